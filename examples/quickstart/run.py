"""The quick start: create a task and a model, warm-start it, train it with PPO or GRPO, compare before and after.

    python examples/quickstart/run.py [--algo ppo|grpo] [--folder runs/quickstart]

Both trainings are the commands of a real run (`verl.trainer.main_sft`, `verl.trainer.main_ppo`); only overrides differ.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from plot import Line, read_line, text_chart, write_png
from task import make_task

ACCURACY = "val/openai/gsm8k/accuracy"
WARM_START_STEPS = 300
STEPS = 60
ROOT = Path(__file__).parents[2]


def warm_start_overrides(files: dict[str, Path], folder: Path) -> list[str]:
    return [
        f"data.train_files={files['sft']}",
        "data.train_batch_size=64",
        "data.micro_batch_size_per_gpu=64",
        "data.max_length=40",
        "data.dataloader_num_workers=0",
        f"model.path={files['model']}",
        "model.enable_gradient_checkpointing=False",
        "optim.lr=2e-3",
        "optim.lr_scheduler=cosine",
        "optim.lr_warmup_steps=20",
        f"trainer.total_training_steps={WARM_START_STEPS}",
        f"trainer.default_local_dir={folder / 'sft'}",
        "trainer.project_name=quickstart",
        "trainer.experiment_name=sft",
        "trainer.logger=[file]",
    ]


def training_overrides(algo: str, files: dict[str, Path], start: Path, folder: Path) -> list[str]:
    shared = [
        f"data.train_files={files['train']}",
        f"data.val_files={files['val']}",
        "data.max_prompt_length=16",
        "data.max_response_length=12",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={start}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.actor.optim.lr=2e-4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=64",
        "trainer.n_gpus_per_node=2",
        "trainer.device=cpu",
        f"trainer.total_training_steps={STEPS}",
        "trainer.test_freq=5",
        "trainer.save_freq=-1",
        f"trainer.default_local_dir={folder / algo}",
        f"trainer.validation_data_dir={folder / algo / 'answers'}",
        "trainer.project_name=quickstart",
        f"trainer.experiment_name={algo}",
        "trainer.logger=[file]",
    ]
    if algo == "grpo":
        return [
            "algorithm=grpo",
            "actor_rollout_ref.rollout.n=4",
            "data.train_batch_size=64",
            "actor_rollout_ref.actor.ppo_mini_batch_size=32",
            *shared,
        ]
    return [
        "algorithm.adv_estimator=gae",
        "algorithm.gamma=1.0",
        "data.train_batch_size=128",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "critic.ppo_mini_batch_size=64",
        "critic.ppo_micro_batch_size_per_gpu=32",
        "critic.forward_micro_batch_size_per_gpu=64",
        "critic.model.enable_gradient_checkpointing=False",
        "critic.optim.lr=1e-3",
        *shared,
    ]


def tracking_overrides(folder: Path, name: str) -> list[str]:
    """Override that writes the metrics of run `name` next to its checkpoints in `folder`."""
    return [f"trainer.tracking_dir={folder / name}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", choices=("ppo", "grpo"), default="ppo")
    parser.add_argument("--folder", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("overrides", nargs="*", help="additional overrides, such as actor_rollout_ref.rollout.name=hf")
    options = parser.parse_args()
    folder, algo = options.folder.resolve(), options.algo
    begin = time.monotonic()
    for old in (folder / "sft", folder / algo):
        shutil.rmtree(old, ignore_errors=True)

    heading("1. A task, a tokenizer and a model with random weights")
    files = make_task(folder / "task")
    print(f"created without downloads: {folder / 'task'}")

    heading(f"2. Warm start: {WARM_START_STEPS} supervised steps on imperfect demonstrations")
    train("verl.trainer.main_sft", warm_start_overrides(files, folder), folder, "sft")

    heading(f"3. {algo.upper()}: {STEPS} steps of reinforcement learning on 2 worker processes")
    start = folder / "sft" / f"global_step_{WARM_START_STEPS}"
    overrides = [*training_overrides(algo, files, start, folder), *options.overrides]
    metrics = train("verl.trainer.main_ppo", overrides, folder, algo)

    heading("4. Before and after")
    accuracy = read_line(metrics, ACCURACY, "accuracy on 256 new problems")
    lines = [accuracy, read_line(metrics, "reward/mean", "reward in training")]
    picture = write_png(folder / f"{algo}.png", f"{algo} on word problems", lines)
    print(text_chart(lines))
    last_step = int(accuracy.points[-1][0])
    show_responses(folder / algo / "answers", last_step)
    report(accuracy, picture, folder / algo / f"global_step_{last_step}", time.monotonic() - begin)


def train(module: str, overrides: list[str], folder: Path, name: str) -> Path:
    """Run a training command with its output in a log file, print its progress; return its metrics file."""
    overrides = [*overrides, *tracking_overrides(folder, name)]
    command = [sys.executable, "-m", module, *overrides]
    print(f"{shlex.join(['python', '-m', module])} \\\n    " + " \\\n    ".join(map(shlex.quote, overrides)))
    metrics = folder / name / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    log = folder / f"{name}.log"
    with log.open("w") as stream:
        process = subprocess.Popen(command, cwd=folder, stdout=stream, stderr=subprocess.STDOUT, env=environment())
        try:
            follow(process, metrics)
        except KeyboardInterrupt:
            process.wait()
            raise
    if process.returncode:
        raise SystemExit(f"{module} failed; last lines of {log}:\n{log.read_text()[-3000:]}")
    print(f"(full log: {log})")
    return metrics


def environment() -> dict[str, str]:
    """Environment variables of a training command."""
    return {
        # Start a new Ray cluster unless RAY_ADDRESS is set.
        "RAY_ADDRESS": "local",
        **os.environ,
        # A model this small is slower on two threads; each of the two worker processes has one core.
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }


def follow(process: subprocess.Popen, metrics: Path) -> None:
    """Print validation results, or every 50th loss, until the process ends."""
    shown = -1
    while True:
        running = process.poll() is None
        records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        for record in records:
            step, data = record["step"], record["data"]
            if step <= shown or (ACCURACY not in data and step % 50 and "train/loss" in data):
                continue
            shown = step
            parts = {"loss": "train/loss", "reward": "reward/mean", "accuracy": ACCURACY}
            values = [f"{short} {data[key]:.3f}" for short, key in parts.items() if key in data]
            if ACCURACY in data or "train/loss" in data:
                print(f"  step {step:3d}   {'   '.join(values)}", flush=True)
        if not running:
            return
        time.sleep(1)


def show_responses(folder: Path, last: int) -> None:
    """Print the responses to five problems, newly solved ones first."""
    before, after = ([json.loads(line) for line in (folder / f"{step}.jsonl").open()] for step in (0, last))
    pairs = sorted(zip(before, after, strict=True), key=lambda pair: pair[0]["score"] - pair[1]["score"])
    for old, new in pairs[:3] + pairs[-2:]:
        print(f"  {old['input'].strip()}\n      before: {old['output'].strip()}\n      after:  {new['output'].strip()}")


def report(accuracy: Line, picture: Path, checkpoint: Path, seconds: float) -> None:
    first, last = accuracy.points[0][1], accuracy.points[-1][1]
    model = checkpoint / "actor" / "huggingface"
    print(f"\naccuracy {first:.0%} before, {last:.0%} after; {seconds:.0f} s total")
    print(f"curve:  {picture}")
    print(f"model:  {model}")
    print("load it with transformers' AutoModelForCausalLM.from_pretrained, or start another run from it:")
    print(f"        actor_rollout_ref.model.path={checkpoint}")


def heading(text: str) -> None:
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    main()
