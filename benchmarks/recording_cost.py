"""Cost of recording a run: the same training steps with `trainer.record.enable` True and False, by `main_ppo` on Ray.

    python benchmarks/recording_cost.py [--folder FOLDER] [--shape qwen2.5-0.5b] [--steps 10] [--json FILE]

The model has random weights of a known shape, and the lengths of responses are forced, so both runs do the same work.
`record %` is the time that recording takes in the trainer's thread (`timing_s/record`) relative to the step; `s/step`
is a median without the first two steps. The recorded run remains in FOLDER/<shape>/recorded: `verl view` shows it.
Without a GPU everything is tiny: this only tests the script.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
from pathlib import Path
from typing import Any

import torch
from _ours_step import base, command, run_limited, training_steps
from _report import report
from _shapes import SHAPES
from _training_work import Work

from verl import recording

_WARM_UP = 2


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/recording_cost"))
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b" if cuda else "tiny")
    parser.add_argument("--steps", type=int, default=10 if cuda else 5)
    parser.add_argument("--limit", type=float, default=270.0, help="maximum seconds of a run")
    parser.add_argument("--json", help="append the table to this file")
    options = parser.parse_args()
    prompts, n, prompt, mean, longest = (32, 8, 128, 256, 2048) if cuda else (4, 4, 32, 16, 64)
    work = Work("b", options.shape, prompts, n, prompt, mean, longest, options.steps)
    folder = work.write((options.folder / options.shape).resolve())
    rows = [measure(work, folder, name, is_recorded, options.limit) for name, is_recorded in
            (("recorded", True), ("not recorded", False))]  # fmt: skip
    report(f"Cost of recording: {work.title()}", rows, options.json)


def measure(work: Work, folder: Path, name: str, is_recorded: bool, limit: float) -> dict[str, Any]:
    """Train; return the row of the table."""
    slug = name.replace(" ", "_")
    run, metrics = folder / slug, folder / "runs" / "training_step" / slug / "metrics.jsonl"
    shutil.rmtree(run, ignore_errors=True)
    metrics.unlink(missing_ok=True)
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parent), str(here), os.environ.get("PYTHONPATH", "")])
    budget = 8192 if torch.cuda.is_available() else 256
    overrides = [
        *base(work, budget, checkpointing=False, compiled=False),
        f"data.val_files={folder / f'{work.case}.parquet'}",
        "data.val_max_samples=16",
        "trainer.val_before_train=True",
        "trainer.test_freq=5",
        f"trainer.record.enable={is_recorded}",
    ]
    environment = {"RAY_ADDRESS": "local", **os.environ, "PYTHONPATH": path}
    problem = run_limited(command(work, folder, slug, overrides), folder, environment, folder / f"{slug}.log", limit)
    steps = training_steps(metrics)
    if len(steps) <= _WARM_UP:
        return {"run": name, "note": problem or "too few steps"}
    measured = steps[_WARM_UP:]
    row: dict[str, Any] = {"run": name, "s/step": statistics.median(step["timing_s/step"] for step in measured)}
    if is_recorded:
        seconds = [step["timing_s/record"] for step in measured]
        row["record ms/step"] = 1e3 * statistics.fmean(seconds)
        row["record %"] = 100 * sum(seconds) / sum(step["timing_s/step"] for step in measured)
        size = sum(file.stat().st_size for file in (run / "record").rglob("*") if file.is_file())
        row |= {"MB": size / 1e6, "recorded steps": len(recording.read(run).trajectories.steps)}
    return row | ({"note": problem} if problem else {})


if __name__ == "__main__":
    main()
