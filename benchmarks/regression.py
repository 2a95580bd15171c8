"""Regression table of verl alone, in two to three minutes: steps (a) and (b) of training_step.py, decoding, and SFT.

    python benchmarks/regression.py                    # measure, compare, append to benchmarks/regression.jsonl
    python benchmarks/regression.py --no-store         # measure and compare
    python benchmarks/regression.py --runs 3           # medians of three runs of everything
    python benchmarks/regression.py --show             # all entries of this machine

An entry has the commit, the machine, versions and the values. It is compared with the last entry of the same machine;
values that are worse by more than 3 % are marked, and the exit code is then 1. Models have random weights (0.5B on a
GPU, tiny on a CPU), so values of GPUs and CPUs are not comparable. Commit the file together with the measured change.
Both cases are measured in one run, first (a), then (b); the first step of each is not counted.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _ours_step import base, run, training_steps
from _report import machine_info, report
from _sft_systems import SFTWork
from _shapes import matmul_rate, shape_config
from _training_work import Work
from decode_step import decode_seconds, longest_measured, random_engine
from sft import measure_system
from training_step import default_budget, work_of

HERE = Path(__file__).parent
FILE = HERE / "regression.jsonl"
TOLERANCE = 0.03
LARGER_IS_BETTER = "tokens/s"
"""Suffix of the names of values that should grow; all others should shrink."""
_PACKAGES = ("torch", "transformers", "ray", "triton")
_STEPS = 3
"""Steps of each case."""


class BothCases(Work):
    """Steps with responses of equal length, case (a), then as many with ragged ones, case (b)."""

    def lengths(self, step: int) -> np.ndarray:
        return np.full((self.prompts, self.n), self.mean) if step < _STEPS else super().lengths(step - _STEPS)


def measure_steps(shape: str, folder: Path, options: argparse.Namespace, rate: float) -> dict[str, float]:
    """Seconds of a training step and its phases, and peak memory, in both cases."""
    cuda = torch.cuda.is_available()
    ragged = work_of("b", shape, _STEPS, small=not cuda)
    work = BothCases(**{**asdict(ragged), "case": "both", "steps": 2 * _STEPS})
    work_folder = work.write(folder / shape)
    overrides = base(work, default_budget(), checkpointing=False, compiled=cuda)
    rows = run(work, work_folder, "all on", overrides, options.limit, rate)
    steps = training_steps(work_folder / "runs" / "training_step" / "both-all-on" / "metrics.jsonl")
    if len(steps) < 2 * _STEPS:
        raise SystemExit(f"regression: {len(steps)} of {2 * _STEPS} steps were measured: {rows[-1].get('note')}")
    return case_values("a", steps[1:_STEPS]) | case_values("b", steps[_STEPS + 1 :])


def case_values(case: str, steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean seconds of these steps and of their phases, and their peak memory, if it was measured."""
    phases = ("gen", "update_actor", "step")
    values = {f"({case}) {name}, s": statistics.mean(step[f"timing_s/{name}"] for step in steps) for name in phases}
    peaks = [value for step in steps for key, value in step.items() if key.startswith("memory_gb/")]
    return values | ({f"({case}) peak, GB": max(peaks)} if peaks else {})


def measure_decoding(shape: str, device: str) -> dict[str, float]:
    """Tokens per second of decoding, without prefill."""
    sequences, context, steps = (256, 256, 32) if device == "cuda" else (4, 64, 16)
    config = shape_config(shape, eos_token_id=None, bos_token_id=None)
    engine = random_engine(config, device, sequences, longest_measured(sequences, context, steps))
    seconds = decode_seconds(engine, sequences, context, steps, device)
    return {f"decode, {LARGER_IS_BETTER}": sequences / seconds}


def measure_sft(shape: str, folder: Path, options: argparse.Namespace, rate: float) -> dict[str, float]:
    """Tokens per second of supervised fine-tuning."""
    cuda = torch.cuda.is_available()
    work = SFTWork(shape, *((128, 512, 2048, 4096) if cuda else (8, 48, 128, 256)), 6)
    settings = argparse.Namespace(budget=16384 if cuda else 256, checkpointing=False, limit=options.limit)
    row = measure_system(settings, work, work.write(folder / f"{shape}-sft"), rate, "ours", "packed")
    if "tokens/s" not in row:
        raise SystemExit(f"regression: SFT was not measured: {row['note']}")
    return {f"SFT, {LARGER_IS_BETTER}": row["tokens/s"]}


def new_entry(values: Mapping[str, float], runs: int) -> dict[str, Any]:
    """The entry of these values, with commit, machine and versions."""
    return {
        "commit": _git("rev-parse", "--short=8", "HEAD") or "unknown",
        "changed_files": len(_git("status", "--porcelain", "--untracked-files=no").splitlines()),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "machine": machine_name(),
        "versions": {name: _version(name) for name in _PACKAGES} | {"python": platform.python_version()},
        "runs": runs,
        "values": {name: round(value, 5) for name, value in values.items()},
    }


def machine_name() -> str:
    """GPU, or processor and cores: entries of the same name are compared."""
    machine = machine_info()
    return machine["gpu"] or f"{_processor()}, {machine['cores']} cores"


def compare(entry: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The values of an entry next to those of the last one of the same machine. `worse`: by more than TOLERANCE."""
    earlier = next((candidate for candidate in reversed(entries) if candidate["machine"] == entry["machine"]), None)
    before = {} if earlier is None else earlier["values"]
    rows = []
    for name, value in entry["values"].items():
        row: dict[str, Any] = {"value": name, "now": value}
        if earlier is not None and name in before:
            change = value / before[name] - 1
            worse = -change if name.endswith(LARGER_IS_BETTER) else change
            row |= {earlier["commit"]: before[name], "change": f"{change:+.1%}", "worse": worse > TOLERANCE}
        rows.append(row)
    return rows


def read_entries(file: Path) -> list[dict[str, Any]]:
    """All entries of a file, the oldest first; [] if it does not exist."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", "-C", str(HERE), *arguments], capture_output=True, text=True, check=False)
    return result.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> int:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1, help="number of complete runs; their medians are stored")
    parser.add_argument("--no-store", action="store_true", help="do not append the entry to the file")
    parser.add_argument("--show", action="store_true", help="print the entries of this machine and measure nothing")
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--limit", type=float, default=240.0, help="maximum seconds of a run")
    parser.add_argument("--json", help="append every table to this file")
    options = parser.parse_args()
    entries = read_entries(options.file)
    if options.show:
        for entry in entries:
            if entry["machine"] == machine_name():
                report(f"{entry['date']}, commit {entry['commit']}", [entry["values"]], options.json)
        return 0
    shape, device = ("qwen2.5-0.5b", "cuda") if cuda else ("tiny", "cpu")
    start, rate = time.monotonic(), matmul_rate(device)
    measured: list[dict[str, float]] = []
    for _ in range(options.runs):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch).resolve()
            values = measure_steps(shape, folder, options, rate)
            values |= measure_sft(shape, folder, options, rate)
            measured.append(values | measure_decoding(shape, device))
    medians = {key: statistics.median(values[key] for values in measured) for key in measured[0]}
    entry = new_entry(medians, options.runs)
    rows = compare(entry, entries)
    title = f"{shape} on {entry['machine']}, commit {entry['commit']}, {time.monotonic() - start:.0f} s"
    report(title, rows, options.json)
    if not options.no_store:
        with options.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(entry) + "\n")
    return int(any(row.get("worse") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
