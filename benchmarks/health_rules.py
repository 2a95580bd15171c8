"""Health rules on deliberately broken runs: after how many steps each problem is detected. Real runs on CPU.

    python benchmarks/health_rules.py [--folder build/health_rules] [--cases "constant reward" ...] [--json FILE]

The task, model and settings are those of examples/quickstart; each case introduces one fault. During the run its
recording is checked as in `verl view`; the run is stopped when an expected rule reports a finding. `healthy` runs to
completion and lists all findings.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _report import report

from verl import recording
from verl.recording import RecordingError, health
from verl.utils.process_tree import kill_tree, with_descendants

sys.path.insert(0, str(Path(__file__).parents[1] / "examples/quickstart"))
from run import WARM_START_STEPS, environment, train, training_overrides, warm_start_overrides
from task import make_task

STEPS = 24
_POLL_S = 0.5
_STOPPED_AFTER = 6
_REWARDS = """
import time

def constant(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0

def slow(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.1)
    return float(solution_str.split("####")[-1].strip() == str(ground_truth).split("####")[-1].strip())
"""


@dataclass(frozen=True)
class Case:
    """A run with a known problem. `rules`: the health rules that report it. `stops_rank`: one rank is stopped."""

    name: str
    overrides: tuple[str, ...]
    rules: tuple[str, ...]
    stops_rank: bool = False


def cases(rewards: Path) -> list[Case]:
    custom = f"custom_reward_function.path={rewards}"
    return [
        Case("healthy", (), ()),
        Case("constant reward", (custom, "custom_reward_function.name=constant"), ("constant_reward", "no_signal")),
        Case(
            "learning rate × 100",
            ("actor_rollout_ref.actor.optim.lr=2e-2",),
            ("diverging_kl", "exploding_gradient", "entropy_collapse"),
        ),
        Case("truncated answers", ("data.max_response_length=5",), ("truncation",)),
        Case("slow reward", (custom, "custom_reward_function.name=slow"), ("slow_rewards",)),
        Case("stopped rank", (), ("stalled",), stops_rank=True),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/health_rules"))
    parser.add_argument("--cases", nargs="+", default=[])
    parser.add_argument("--limit", type=float, default=240.0, help="maximum seconds of a run")
    parser.add_argument("--json", help="append the table to this file")
    options = parser.parse_args()
    folder = options.folder.resolve()
    files = make_task(folder / "task")
    start = folder / "sft" / f"global_step_{WARM_START_STEPS}"
    if not start.is_dir():
        train("verl.trainer.main_sft", warm_start_overrides(files, folder), folder, "sft")
    (folder / "rewards.py").write_text(_REWARDS)
    rows = [
        run_case(case, files, start, folder, options.limit)
        for case in cases(folder / "rewards.py")
        if not options.cases or case.name in options.cases
    ]
    report("Health rules on broken runs", rows, options.json)


def run_case(case: Case, files: dict[str, Path], start: Path, folder: Path, limit: float) -> dict[str, Any]:
    """Train until an expected rule reports the problem or the time limit is over; return the row of the table."""
    name = case.name.replace(" × ", "_x_").replace(" ", "_")
    run = folder / name
    shutil.rmtree(run, ignore_errors=True)
    overrides = [
        *training_overrides("grpo", files, start, folder),
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.default_local_dir={run}",
        "trainer.validation_data_dir=null",
        "trainer.max_restarts=0",
        *case.overrides,
    ]
    with training(overrides, folder / f"{name}.log") as process:
        return watch(case, run, process, time.monotonic() + limit)


@contextmanager
def training(overrides: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A training run, which is killed at the end of the block."""
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides]
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, cwd=log.parent, stdout=stream, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
        )
        try:
            yield process
        finally:
            kill_tree(process.pid)
            process.wait()


def watch(case: Case, run: Path, process: subprocess.Popen[bytes], deadline: float) -> dict[str, Any]:
    """Poll the recording until an expected rule reports a problem, the run ends or `deadline` has passed."""
    stopped_at: float | None = None
    first_steps: dict[str, int] = {}
    while time.monotonic() < deadline:
        is_running = process.poll() is None
        tables = _tables(run)
        if tables is not None:
            step = tables.last_step
            for finding in health.findings(tables):
                first_steps.setdefault(finding.rule, step)
            hits = [rule for rule in case.rules if rule in first_steps]
            if hits:
                delay = {} if stopped_at is None else {"s after the stop": time.monotonic() - stopped_at}
                first = min(hits, key=lambda rule: first_steps[rule])
                return {"run": case.name, "detected by": ", ".join(hits), "at step": first_steps[first], **delay}
            if case.stops_rank and stopped_at is None and step >= _STOPPED_AFTER:
                stopped_at = time.monotonic()
                os.kill(rank_pid(run, process.pid), signal.SIGSTOP)
        if not is_running:
            break
        time.sleep(_POLL_S)
    note = ", ".join(f"{rule} at step {step}" for rule, step in first_steps.items()) or "no finding"
    return {"run": case.name, "detected by": "-" if case.rules else "nothing to detect", "note": note}


def _tables(run: Path) -> health.RunTables | None:
    """The tables that the rules read; None before anything is recorded."""
    try:
        return health.load(recording.read(run), time.time())
    except RecordingError:
        return None


def rank_pid(run: Path, root: int) -> int:
    """Process of the last rank of the run."""
    phases = recording.read(run).phases.table().to_pylist()
    ranks = {
        row["track"]: row["pid"] for row in phases if "/" in row["track"] and not row["track"].startswith("engine/")
    }
    pid = ranks[max(ranks)]
    if pid not in with_descendants(root):
        raise RuntimeError(f"process {pid} of {max(ranks)} is no descendant of the run.")
    return int(pid)


if __name__ == "__main__":
    main()
