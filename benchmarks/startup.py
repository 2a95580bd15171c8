"""Seconds from a command to the end of its first step by part, and the CPU time of every process.

    python benchmarks/startup.py                                   # GRPO on the task of the quick start, one step
    python benchmarks/startup.py --run quickstart                  # `make train`, complete
    python benchmarks/startup.py --before COMMIT --repeat 3        # alternates with a worktree of COMMIT
    python benchmarks/startup.py --run gpu --shape qwen2.5-1.5b    # a model with random weights: cold, then warm caches

Parts are the start-up phases that a run logs. Phases of different processes overlap. Everything runs in a new cache
folder (`VERL_CACHE`); the second repetition of a commit and all later ones find the caches of the first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "examples" / "quickstart")]

from _report import report  # noqa: E402
from _startup_run import Measurement, logged_phases, measure  # noqa: E402

# On a GPU, compilation for further sizes follows the first step.
GPU_STEPS = 4


def quickstart(tree: Path, folder: Path, caches: Path, shape: str) -> Measurement:
    """The complete quick start with PPO; parts are the phases of its two commands."""
    command = [sys.executable, str(tree / "examples/quickstart/run.py"), "--folder", str(folder / "run")]
    result = measure(command, folder, folder / "run" / "ppo" / "metrics.jsonl", _environment(tree, caches))
    for name, log in (("warm start", "sft.log"), ("PPO", "ppo.log")):
        result.add_parts(logged_phases((folder / "run" / log).read_text()), f"{name}: ")
    return result


def grpo(tree: Path, folder: Path, caches: Path, shape: str) -> Measurement:
    """One step of GRPO on two ranks on a CPU, from the model with random weights of the quick start."""
    from run import tracking_overrides, training_overrides
    from task import make_task

    files = make_task(folder / "task")
    overrides = [
        *training_overrides("grpo", files, files["model"], folder),
        *tracking_overrides(folder, "grpo"),
        "trainer.total_training_steps=1",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
    ]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides]
    return measure(command, folder, folder / "grpo" / "metrics.jsonl", _environment(tree, caches))


def gpu(tree: Path, folder: Path, caches: Path, shape: str) -> Measurement:
    """Case (a) of `training_step.py` with compiled layers: 32 × 8 responses of 128 + 256 tokens on one GPU."""
    from _ours_step import base, command
    from training_step import default_budget, work_of

    work = work_of("a", shape, GPU_STEPS, small=False)
    work.write(folder)
    overrides = [*base(work, default_budget(), checkpointing=False, compiled=True), f"trainer.tracking_dir={folder}"]
    run = command(work, folder, "startup", overrides)
    return measure(run, folder, folder / "metrics.jsonl", _environment(tree, caches))


RUNS: dict[str, Callable[[Path, Path, Path, str], Measurement]] = {"grpo": grpo, "quickstart": quickstart, "gpu": gpu}


def _environment(tree: Path, caches: Path) -> dict[str, str]:
    paths = os.pathsep.join([str(tree), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    settings = {"PYTHONPATH": paths, "VERL_CACHE": str(caches), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    # As in normal use: processes read the byte code that earlier ones wrote.
    settings["PYTHONDONTWRITEBYTECODE"] = ""
    return {"RAY_ADDRESS": "local", **os.environ, **settings}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", choices=sorted(RUNS), default="grpo")
    parser.add_argument("--shape", default="qwen2.5-1.5b", help="with --run gpu: a shape of _shapes.py")
    parser.add_argument("--repeat", type=int, default=2, help="runs of each tree; the first has cold caches")
    parser.add_argument("--before", help="also measure this commit, alternately")
    parser.add_argument("--json", help="append the tables to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        trees = ({"before": before_tree(options.before, work / "before")} if options.before else {}) | {"now": ROOT}
        results: dict[str, list[Measurement]] = {tree: [] for tree in trees}
        for repetition in range(options.repeat):
            for label, tree in trees.items():
                folder = work / f"{label}{repetition}"
                folder.mkdir()
                caches = work / f"{label}-caches"
                caches.mkdir(exist_ok=True)
                results[label].append(RUNS[options.run](tree, folder, caches, options.shape))
    title = f"start-up of {options.run}" + (f", {options.shape}" if options.run == "gpu" else "")
    report(f"{title}: seconds", time_rows(results), options.json)
    report(f"{title}: CPU seconds by process", cpu_rows(results), options.json)


def before_tree(commit: str, folder: Path) -> Path:
    """Check out a commit as a git worktree in `folder`."""
    from same_bits import git

    git("worktree", "prune")
    git("worktree", "add", "--detach", "--force", str(folder), commit)
    return folder


def time_rows(results: dict[str, list[Measurement]]) -> list[dict[str, Any]]:
    """A row per part: the first run of each tree (cold caches), and the median of the others (warm caches)."""
    names = list(dict.fromkeys(name for runs in results.values() for run in runs for name in run.parts))
    rows = [_row(name, results, lambda run, name=name: run.parts.get(name)) for name in names]  # type: ignore[misc]
    rows.append(_row("to the end of step 1", results, lambda run: run.step_1))
    rows.append(_row("to the end", results, lambda run: run.total))
    return rows


def cpu_rows(results: dict[str, list[Measurement]]) -> list[dict[str, Any]]:
    """A row per kind of process."""
    names = list(dict.fromkeys(name for runs in results.values() for run in runs for name in run.cpu))
    rows = [_row(name, results, lambda run, name=name: run.cpu.get(name), "process") for name in names]  # type: ignore[misc]
    return [*rows, _row("all processes", results, lambda run: sum(run.cpu.values()), "process")]


def _row(
    name: str, results: dict[str, list[Measurement]], value: Callable[..., float | None], column: str = "part"
) -> dict[str, Any]:
    row: dict[str, Any] = {column: name}
    for label, runs in results.items():
        values = [value(run) for run in runs]
        warm = [seconds for seconds in values[1:] if seconds is not None]
        row[f"{label}, cold"] = values[0]
        if len(runs) > 1:
            row[f"{label}, warm"] = statistics.median(warm) if warm else None
    return row


if __name__ == "__main__":
    main()
