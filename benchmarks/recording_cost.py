"""Cost of recording a run: the same training steps with `trainer.record.enable` True and False, by `main_ppo` on Ray.

    python benchmarks/recording_cost.py [--folder FOLDER] [--shape qwen2.5-0.5b] [--steps 7] [--order off,on,on,off]

The model has random weights of a known shape, and the lengths of responses are forced, so all runs do the same work.
The order is symmetric: drift over time (caches of compiled kernels, clocks of the GPU) affects both settings equally.
The first table has a row per run; the second compares phases: medians over all steps of both runs of a setting, without
the first two steps of each. `noise %` is the difference between the two runs without recording: a difference of the
same size is not caused by recording. `record ms/step` is the time that recording takes in the trainer's thread
(`timing_s/record`). The last recorded run remains in FOLDER/<shape>/recorded: `verl view` shows it. Without a GPU
everything is tiny. Four runs of 7 steps of 0.5B take about 4 minutes on an H200.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _ours_step import base, command, run_limited, training_steps
from _report import report
from _shapes import SHAPES
from _training_work import Work

_WARM_UP = 2


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/recording_cost"))
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b" if cuda else "tiny")
    parser.add_argument("--steps", type=int, default=7 if cuda else 12)
    parser.add_argument("--order", default="off,on,on,off", help="the runs, separated by commas: on (recorded) or off")
    parser.add_argument("--limit", type=float, default=270.0, help="maximum seconds of a run")
    parser.add_argument("--json", help="append the tables to this file")
    options = parser.parse_args()
    prompts, n, prompt, mean, longest = (32, 8, 128, 256, 2048) if cuda else (4, 4, 32, 16, 64)
    work = Work("b", options.shape, prompts, n, prompt, mean, longest, options.steps)
    folder = work.write((options.folder / options.shape).resolve())
    runs = [train(work, folder, name == "on", options.limit) for name in options.order.split(",")]
    report(f"Cost of recording: {work.title()}", [run.row() for run in runs], options.json)
    report("Medians per phase, s", compare(runs), options.json)


@dataclass(frozen=True)
class Run:
    """A run: its measured steps, and why it is incomplete, if it is."""

    is_recorded: bool
    steps: Sequence[Mapping[str, float]]
    folder: Path
    megabytes: float
    problem: str | None

    def row(self) -> dict[str, Any]:
        """The row of the first table."""
        row: dict[str, Any] = {"run": "recorded" if self.is_recorded else "not recorded"}
        if not self.steps:
            return row | {"note": self.problem or "too few steps"}
        row["s/step"] = statistics.median(step["timing_s/step"] for step in self.steps)
        if self.is_recorded:
            seconds = [step["timing_s/record"] for step in self.steps]
            row["record ms/step"] = 1e3 * statistics.fmean(seconds)
            row["record %"] = 100 * sum(seconds) / sum(step["timing_s/step"] for step in self.steps)
            row["MB"] = self.megabytes
        return row | ({"note": self.problem} if self.problem else {})


def train(work: Work, folder: Path, is_recorded: bool, limit: float) -> Run:
    """Execute a training run; return its measured steps."""
    run_name = "recorded" if is_recorded else "not_recorded"
    run, metrics = folder / run_name, folder / "runs" / "training_step" / run_name / "metrics.jsonl"
    shutil.rmtree(run, ignore_errors=True)
    metrics.unlink(missing_ok=True)
    benchmarks = Path(__file__).parent
    path = os.pathsep.join([str(benchmarks.parent), str(benchmarks), os.environ.get("PYTHONPATH", "")])
    budget = 8192 if torch.cuda.is_available() else 256
    overrides = [
        *base(work, budget, checkpointing=False, compiled=False),
        f"data.val_files={folder / f'{work.case}.parquet'}",
        "data.val_max_samples=16",
        "trainer.val_before_train=False",
        "trainer.test_freq=5",
        f"trainer.record.enable={is_recorded}",
    ]
    environment = {"RAY_ADDRESS": "local", **os.environ, "PYTHONPATH": path}
    problem = run_limited(
        command(work, folder, run_name, overrides), folder, environment, folder / f"{run_name}.log", limit
    )
    size = sum(file.stat().st_size for file in (run / "record").rglob("*") if file.is_file())
    return Run(is_recorded, training_steps(metrics)[_WARM_UP:], run, size / 1e6, problem)


def compare(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Rows of the second table: the step and its phases, the longest first."""
    complete = [run for run in runs if run.steps]
    on, off = ([run for run in complete if run.is_recorded is side] for side in (True, False))
    if not on or not off:
        return []
    names = {name for run in complete for step in run.steps for name in step if name.startswith("timing_s/")}
    rows = []
    for name in names - {"timing_s/record"}:
        recorded, plain = (_median([step for run in side for step in run.steps], name) for side in (on, off))
        if recorded is None or plain is None:
            continue
        plain_medians = [value for run in off if (value := _median(run.steps, name)) is not None]
        noise = 100 * (max(plain_medians) - min(plain_medians)) / plain if len(plain_medians) > 1 and plain else None
        difference = 100 * (recorded - plain) / plain if plain else None
        row = {"phase": name.removeprefix("timing_s/"), "recorded": recorded, "not recorded": plain}
        rows.append(row | {"difference %": difference, "noise %": noise})
    return sorted(rows, key=lambda row: -float(row["not recorded"]))


def _median(steps: Sequence[Mapping[str, float]], name: str) -> float | None:
    values = [step[name] for step in steps if name in step]
    return statistics.median(values) if values else None


if __name__ == "__main__":
    main()
