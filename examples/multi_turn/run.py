"""Agents on a CPU: warm-start a tiny model, train it with a calculator or a simulated user, compare before and after.

    python examples/multi_turn/run.py calculator     # a function as a tool
    python examples/multi_turn/run.py mcp            # the same function on an MCP server
    python examples/multi_turn/run.py user           # a simulated user, who knows the number that the order omits

Both trainings are the commands of a real run (`verl.trainer.main_sft`, `verl.trainer.main_ppo`); only overrides differ.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from quickstart.run import ACCURACY, heading, train, warm_start_overrides
from tasks import make_task

HERE = Path(__file__).parent.resolve()
STEPS = 30
ROLLOUT = "actor_rollout_ref.rollout"
PROJECT = "multi_turn"
# Overrides that define the environment.
ENVIRONMENTS = {
    "calculator": [f"{ROLLOUT}.multi_turn.function_tool_path={HERE / 'calculator.py'}"],
    "mcp": [f"{ROLLOUT}.multi_turn.tool_config_path={HERE / 'mcp_tools.yaml'}"],
    "user": [
        f"{ROLLOUT}.multi_turn.interaction_config_path={HERE / 'customer.yaml'}",
        # Without normalization a needless question costs less than a wrong answer.
        "algorithm.norm_adv_by_std_in_grpo=False",
    ],
}


def training_overrides(kind: str, files: dict[str, Path], start: Path, folder: Path) -> list[str]:
    """GRPO with 64 questions per step and four conversations per question."""
    return [
        "algorithm=grpo",
        f"data.train_files={files['train']}",
        f"data.val_files={files['val']}",
        "data.train_batch_size=64",
        "data.max_prompt_length=24",
        "data.max_response_length=64",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={start}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=64",
        f"{ROLLOUT}.n=4",
        f"{ROLLOUT}.max_model_len=96",
        f"{ROLLOUT}.mode=async",
        f"{ROLLOUT}.agent.num_workers=1",
        f"{ROLLOUT}.agent.max_concurrent_requests=256",
        f"{ROLLOUT}.multi_turn.enable=True",
        f"{ROLLOUT}.multi_turn.max_assistant_turns=2",
        *ENVIRONMENTS[kind],
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        f"trainer.total_training_steps={STEPS}",
        "trainer.test_freq=10",
        "trainer.save_freq=-1",
        f"trainer.default_local_dir={folder / kind}",
        f"trainer.rollout_data_dir={folder / kind / 'conversations'}",
        f"trainer.project_name={PROJECT}",
        f"trainer.experiment_name={kind}",
        "trainer.logger=[file]",
    ]


def warm_start(files: dict[str, Path], folder: Path) -> Path:
    """The supervised run of the quick start, on conversations."""
    changes = ["data.multiturn=True", "data.max_length=96", f"trainer.project_name={PROJECT}"]
    train("verl.trainer.main_sft", [*warm_start_overrides(files, folder), *changes], folder, "sft")
    return folder / "sft" / "global_step_300"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=sorted(ENVIRONMENTS))
    parser.add_argument("--folder", type=Path, help="default: runs/multi_turn/<kind>")
    parser.add_argument("--seed", type=int, default=1, help="seed of the task and the random model")
    parser.add_argument("overrides", nargs="*", help="additional overrides, such as trainer.total_training_steps=60")
    options = parser.parse_intermixed_args()
    kind, begin = options.kind, time.monotonic()
    os.environ |= {"PYTHON": sys.executable, "MULTI_TURN": str(HERE)}  # for customer.yaml and mcp_servers.json
    folder = (options.folder or Path("runs/multi_turn") / kind).resolve()
    for old in (folder / "sft", folder / kind):
        shutil.rmtree(old, ignore_errors=True)

    heading("1. Questions, a tokenizer and a model with random weights")
    files = make_task(folder / "task", kind, options.seed)
    print(f"created without downloads: {folder / 'task'}")
    heading("2. Warm start: 300 supervised steps on demonstrations")
    start = warm_start(files, folder)
    heading(f"3. GRPO: {STEPS} steps with the {kind}")
    overrides = [*training_overrides(kind, files, start, folder), *options.overrides]
    metrics = train("verl.trainer.main_ppo", overrides, folder, kind)
    heading("4. Before and after")
    show_conversation(folder / kind / "conversations")
    report(metrics, time.monotonic() - begin)


def show_conversation(folder: Path) -> None:
    """Print a conversation of the last step, turn by turn, from `trainer.rollout_data_dir`."""
    last = max(folder.glob("*.jsonl"), key=lambda path: int(path.stem))
    lines = [json.loads(line) for line in last.read_text().splitlines()]
    chosen = max(lines, key=lambda line: (line["score"], len(line["turns"])))
    print(f"  {chosen['input'].strip()}")
    for turn in chosen["turns"]:
        print(f"      {turn['by']}: {turn['text'].strip()}")


def report(metrics: Path, seconds: float) -> None:
    rows = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    for title, name in (
        ("accuracy", ACCURACY),
        ("reward", "reward/mean"),
        ("turns", "num_turns/mean"),
        ("tool calls", "tool_call_counts/mean"),
    ):
        values = [row[name] for row in rows if name in row]
        print(f"{title} {values[0]:.2f} before, {values[-1]:.2f} after")
    print(f"{seconds:.0f} s total; all metrics: {metrics}")


if __name__ == "__main__":
    main()
