"""The complete pipeline on a CPU in minutes: SFT -> reward model -> PPO with it -> merge -> serve.

    python examples/tour/run.py [--folder runs/tour]

Every stage is the command of a real run on the folder of the previous stage; only overrides differ. Problems,
tokenizer, model and demonstrations are those of the quick start (`examples/quickstart/task.py`): most demonstrations
add where they should subtract, and only the preference pairs show which operator is correct.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))
import run as quickstart
from run import environment, heading
from task import Problem, make_task, problems

from verl.utils.reward_score import default_compute_score

PAIRS = {"pairs": 2000, "held_out": 200}  # prompts, two pairs each
STAGES = ("sft", "rm", "ppo", "merged")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/tour"))
    folder = parser.parse_args().folder.resolve()
    begin = time.monotonic()
    for stage in STAGES:
        shutil.rmtree(folder / stage, ignore_errors=True)

    heading("1. A task, a tokenizer and a model with random weights")
    files = make_task(folder / "task") | make_pairs(folder / "task")

    heading("2. Supervised fine-tuning on imperfect demonstrations")
    train("verl.trainer.main_sft", quickstart.warm_start_overrides(files, folder), folder, "sft")

    heading("3. A reward model trained on preference pairs")
    rm_accuracy = last(
        train("verl.trainer.main_rm", reward_model_overrides(files, folder), folder, "rm"), "val/accuracy"
    )

    heading("4. PPO with the reward model")
    metrics = train("verl.trainer.main_ppo", ppo_overrides(files, folder), folder, "ppo")
    steps = sorted(int(file.stem) for file in (folder / "ppo" / "answers").glob("*.jsonl"))
    responses = [folder / "ppo" / "answers" / f"{step}.jsonl" for step in (steps[0], steps[-1])]
    before, after = (accuracy(file, files["val"]) for file in responses)

    heading("5. Merge the shards of the checkpoint into one model")
    step = folder / "ppo" / (folder / "ppo" / "latest").read_text().strip() / "actor"
    arguments = ["--backend", "fsdp", "--local_dir", str(step)]
    run_module("verl.model_merger", "merge", *arguments, "--target_dir", str(folder / "merged"))
    run_module("verl.model_merger", "test", *arguments, "--test_hf_dir", str(folder / "merged"))

    heading("6. Serve it with the OpenAI API")
    with serve(folder / "merged", folder) as url:
        for problem in islice(problems(99), 3):
            print(f"  {problem.question}\n      {complete(url, problem.question)}    (correct: {problem.result})")

    print(f"\naccuracy of the reward model on new pairs: {rm_accuracy:.0%}")
    print(
        f"reward {first(metrics, 'reward/mean'):.2f} in the first step of PPO, {last(metrics, 'reward/mean'):.2f} after"
    )
    print(f"accuracy {before:.0%} before PPO, {after:.0%} after; {time.monotonic() - begin:.0f} s total")
    print(f"model: {folder / 'merged'}")


# ---------------------------------------------------------------- data


def make_pairs(folder: Path) -> dict[str, Path]:
    """`pairs.parquet` and `held_out.parquet`: the correct answer paired with one that has the wrong operator, and with
    one that lacks the final `#### number`."""
    stream, paths = problems(seed=2), {}
    for name, count in PAIRS.items():
        rows = [row for problem in islice(stream, count) for row in pairs_of(problem)]
        paths[name] = folder / f"{name}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), paths[name])
    return paths


def pairs_of(problem: Problem) -> Iterator[dict[str, str]]:
    other = "-" if problem.operator == "+" else "+"
    wrong = abs(problem.have + problem.change if other == "+" else problem.have - problem.change)
    right = f"{problem.have} {problem.operator} {problem.change} = {problem.result}"
    for rejected in (f"{problem.have} {other} {problem.change} = {wrong} #### {wrong}", right):
        yield {"prompt": problem.question, "chosen": f"{right} #### {problem.result}", "rejected": rejected}


def accuracy(responses: Path, questions: Path) -> float:
    """Share of correct responses by the rule-based reward, which PPO does not use."""
    rows = pq.read_table(questions).to_pylist()
    truths = {row["prompt"][0]["content"]: row["reward_model"]["ground_truth"] for row in rows}
    outputs = [json.loads(line) for line in responses.read_text().splitlines()]
    scores = [default_compute_score("openai/gsm8k", row["output"], truths[row["input"].strip()]) for row in outputs]
    return sum(map(float, scores)) / len(scores)


# ---------------------------------------------------------------- stages


def reward_model_overrides(files: dict[str, Path], folder: Path) -> list[str]:
    return [
        f"data.train_files={files['pairs']}",
        f"data.val_files={files['held_out']}",
        "data.train_batch_size=32",
        "data.micro_batch_size_per_gpu=32",
        "data.max_length=40",
        f"model.path={folder / 'sft'}",
        "model.enable_gradient_checkpointing=False",
        "optim.lr=1e-3",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.total_epochs=1",
        "trainer.save_freq=0",
        f"trainer.default_local_dir={folder / 'rm'}",
        "trainer.experiment_name=rm",
        "trainer.logger=[file]",
    ]


def ppo_overrides(files: dict[str, Path], folder: Path) -> list[str]:
    """Overrides of PPO with the reward model, which does not check calculations; the KL penalty preserves them."""
    return [
        *quickstart.training_overrides("ppo", files, folder / "sft", folder),
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=20",
        "actor_rollout_ref.actor.use_kl_loss=False",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.kl_coef=0.2",
        f"critic.model.path={folder / 'rm'}",
        "reward_model.enable=True",
        f"reward_model.path={folder / 'rm'}",
    ]


def train(module: str, overrides: list[str], folder: Path, name: str) -> Path:
    """Run a stage of the tour. If an override is given twice, the last value is used."""
    values = dict(override.split("=", 1) for override in [*overrides, "trainer.project_name=tour"])
    return quickstart.train(module, [f"{key}={value}" for key, value in values.items()], folder, name)


def run_module(module: str, *arguments: str) -> None:
    print(f"{shlex.join(['python', '-m', module, *arguments])}", flush=True)
    subprocess.run([sys.executable, "-m", module, *arguments], env=environment(), check=True)


@contextmanager
def serve(model: Path, folder: Path) -> Iterator[str]:
    """Serve the model until the block ends; yields the address when the server is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["-m", "verl.inference.server", "--model", str(model), "--port", str(port)]
    print(shlex.join(["python", *command]), flush=True)
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen([sys.executable, *command], stdout=log, stderr=subprocess.STDOUT, env=environment())
    try:
        url = f"http://127.0.0.1:{port}"
        while not is_ready(f"{url}/health"):
            if server.poll() is not None:
                raise SystemExit(f"the server exited; its log:\n{(folder / 'server.log').read_text()[-3000:]}")
            time.sleep(0.5)
        yield url
    finally:
        server.terminate()
        server.wait()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def complete(url: str, question: str) -> str:
    """The greedy response of the server to a question."""
    body: dict[str, Any] = {"model": "merged", "messages": [{"role": "user", "content": question}]}
    body |= {"temperature": 0, "max_tokens": 12}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["message"]["content"]


# ---------------------------------------------------------------- metrics


def metric_values(metrics: Path, key: str) -> list[float]:
    records = map(json.loads, metrics.read_text().splitlines())
    return [record["data"][key] for record in records if key in record["data"]]


def first(metrics: Path, key: str) -> float:
    return metric_values(metrics, key)[0]


def last(metrics: Path, key: str) -> float:
    return metric_values(metrics, key)[-1]


if __name__ == "__main__":
    main()
