"""Planned and measured peak memory of every phase, for 20 configurations on one GPU.

    python benchmarks/memory_plan.py --out memory.jsonl                     # continues where an earlier call stopped
    python benchmarks/memory_plan.py --out memory.jsonl --until 540         # starts no case after 540 s
    python benchmarks/memory_plan.py --out memory.jsonl --table             # only prints the table of the file
    python benchmarks/memory_plan.py --out tiny.jsonl                       # without a GPU: tests the script

Every case is a whole run of two steps (`main_ppo`, `main_sft`, `main_rm`) of a model with random weights, in its own
process; all sequences have the maximum length. A finished case is appended to the file with the commit and the machine,
and is not repeated (`--again` repeats it). A case that failed is repeated.

Measured on the device: memory allocated by torch and mapped by the rollout engine, as in `memory_gb/<phase>`; compared
with the plan without context and fragmentation. Measured on the host: the decrease of available memory since before the
run. A phase passes if the plan is within 5 % or 0.5 GB of the measured peak. On CPUs only the host is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from _memory_cases import CASES, TINY_CASES, Case
from _ours_step import run_limited
from _report import machine_info, report

from verl.config import RMConfig, SFTConfig, load_config
from verl.config.devices import host_memory_available
from verl.planning.check import available_memory, model_shapes, supervised_shape
from verl.planning.phases import GB, MemoryPlan
from verl.planning.plan import memory_plan, supervised_memory_plan

ALL_CASES = CASES | TINY_CASES
_ROOTS: dict[str, Any] = {"sft": SFTConfig, "rm": RMConfig}
_REPOSITORY = Path(__file__).resolve().parents[1]
# A plan is accurate within one of these: fraction of the measured peak, and GB.
TOLERANCE, TOLERANCE_GB = 0.05, 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("memory_plan.jsonl"), help="file with the results")
    parser.add_argument("--cases", nargs="+", choices=ALL_CASES, help="default: all for a GPU, the tiny ones without")
    parser.add_argument("--again", action="store_true", help="repeat cases that are in the file")
    parser.add_argument("--until", type=float, default=float("inf"), help="seconds after which no case is started")
    parser.add_argument("--limit", type=float, default=540, help="seconds of one case")
    parser.add_argument("--commit", help="commit to record (default: that of the repository)")
    parser.add_argument("--table", action="store_true", help="print the table of the file and run nothing")
    parser.add_argument("--supervised", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--write", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        name, folder = options.write
        ALL_CASES[name].write(Path(folder))
        return
    if options.supervised:
        run_supervised(*options.supervised)
        return
    if not options.table:
        measure_missing(options)
    rows = table(read_results(options.out).values())
    report(f"memory plan: planned and measured peak, GB ({summary(rows)})", rows or [{"case": "none"}])


def measure_missing(options: argparse.Namespace) -> None:
    """Run the cases that have no successful result in the file."""
    begin = time.monotonic()
    names = options.cases or list(CASES if torch.cuda.is_available() else TINY_CASES)
    finished = {} if options.again else read_results(options.out)
    commit = options.commit or current_commit()
    for name in names:
        if name in finished and finished[name]["problem"] is None:
            continue
        if time.monotonic() - begin > options.until:
            print(f"{name} and later cases: not started after {options.until:.0f} s", flush=True)
            return
        start = time.monotonic()
        result = measure(name, ALL_CASES[name], options.limit)
        record = {"commit": commit, "machine": machine_info(), "seconds": time.monotonic() - start, **result}
        append(options.out, record)
        print(f"{name}: {record['seconds']:.0f} s{', ' + result['problem'] if result['problem'] else ''}", flush=True)


# ---------------------------------------------------------------- one case


def measure(name: str, case: Case, limit: float) -> dict[str, Any]:
    """Plan and run a case; return planned and measured GB by phase, and the problem of a run that failed."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, script, log = Path(temporary), str(Path(__file__).resolve()), Path(temporary) / "run.log"
        # In its own process: this one would keep a context on the device.
        subprocess.run([sys.executable, script, "--write", name, temporary], check=True, env=environment())
        overrides = case.run_overrides(folder)
        plan = planned(case, overrides)
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides]
        if case.program != "train":
            (folder / "overrides.json").write_text(json.dumps(overrides))
            command = [sys.executable, script, "--supervised", case.program, str(folder)]
        with HostMonitor() as host:
            problem = run_limited(command, folder, environment(), log, limit)
        peaks = measured_peaks(case, folder, log)
        if problem is None and not peaks and torch.cuda.is_available():
            problem = "the run recorded no memory"
        return {
            "case": name,
            "overrides": [override.replace(str(folder), "") for override in overrides],
            "planned_gb": {phase.phase: phase.allocated / GB for phase in plan.phases},
            "planned_total_gb": {phase.phase: phase.total / GB for phase in plan.phases},
            "measured_gb": peaks,
            "host_gb": host.peak / GB,
            "problem": problem,
        }


def environment() -> dict[str, str]:
    """Return the environment of child processes."""
    path = os.pathsep.join([str(_REPOSITORY), str(_REPOSITORY / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    return {"RAY_ADDRESS": "local", **os.environ, "PYTHONPATH": path}


def planned(case: Case, overrides: list[str]) -> MemoryPlan:
    """Return the plan of a run on this machine."""
    if case.program == "train":
        config = load_config(None, overrides)
        shapes, _ = model_shapes(config, {})
        return memory_plan(config, shapes, *available_memory(config.trainer))
    supervised = load_config(None, overrides, root=_ROOTS[case.program])
    shape = supervised_shape(supervised, supervised.model.path)
    assert shape is not None
    return supervised_memory_plan(supervised, shape, *available_memory(supervised.trainer))


def measured_peaks(case: Case, folder: Path, log: Path) -> dict[str, float]:
    """Return the peak GB of each phase on the device over all steps of a run; empty on CPUs."""
    if case.program != "train":
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("PEAK ")]
        return {"sft": float(lines[-1].removeprefix("PEAK ")) / GB} if lines and torch.cuda.is_available() else {}
    peaks: dict[str, float] = {}
    metrics = folder / "runs" / "memory" / "case" / "metrics.jsonl"
    for line in metrics.read_text().splitlines() if metrics.exists() else ():
        for key, value in json.loads(line)["data"].items():
            phase = key.removeprefix("memory_gb/")
            if phase != key and not phase.endswith("/after"):
                peaks[phase] = max(peaks.get(phase, 0.0), value)
    return peaks


def run_supervised(program: str, folder: str) -> None:
    """Train in this process and print the peak of its device memory in bytes."""
    from verl.trainer.main_rm import run_rm
    from verl.trainer.main_sft import run_sft
    from verl.utils.device import memory_in_use

    overrides = json.loads((Path(folder) / "overrides.json").read_text())
    config = load_config(None, overrides, root=_ROOTS[program])
    {"sft": run_sft, "rm": run_rm}[program](config)
    peak, _ = memory_in_use(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    print(f"PEAK {peak}", flush=True)


class HostMonitor:
    """Maximum decrease of available host memory in the context, sampled ten times per second."""

    def __enter__(self) -> HostMonitor:
        self.peak = 0
        self._before = host_memory_available()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stopped.wait(0.1):
            self.peak = max(self.peak, self._before - host_memory_available())


# ---------------------------------------------------------------- results


def current_commit() -> str:
    """Return the commit of the repository, `+` if it has changes; `unknown` outside of git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(_REPOSITORY), *arguments]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        return process.stdout.strip()

    commit = git("rev-parse", "--short=10", "HEAD")
    return f"{commit}{'+' if git('status', '--porcelain') else ''}" if commit else "unknown"


def append(file: Path, record: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(record) + "\n")


def read_results(file: Path) -> dict[str, dict[str, Any]]:
    """Return the last result of each case, in the order of the cases; a line that was cut off is ignored."""
    results: dict[str, dict[str, Any]] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        results[record["case"]] = record
    return {name: results[name] for name in ALL_CASES if name in results}


def table(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per phase of every case, one of the whole step, whose peak may be in a phase without a plan (a
    weight sync), and one of the host memory."""
    rows: list[dict[str, Any]] = []
    for result in results:
        names = {"case": result["case"], "commit": result["commit"]}
        if result["problem"] is not None:
            rows.append({**names, "phase": "failed", "note": result["problem"][:80]})
            continue
        for phase, gb in result["planned_gb"].items():
            peak = result["measured_gb"].get(phase)
            if peak is not None:
                rows.append({**names, "phase": phase, "planned": gb, "measured": peak, "within": is_within(gb, peak)})
        if (peak := result["measured_gb"].get("step")) is not None:
            gb = max(result["planned_gb"][phase] for phase in result["measured_gb"] if phase in result["planned_gb"])
            rows.append({**names, "phase": "step", "planned": gb, "measured": peak, "within": is_within(gb, peak)})
        host = max(gb for phase, gb in result["planned_total_gb"].items() if phase.endswith("train"))
        rows.append({**names, "phase": "host", "planned": host, "measured": result["host_gb"]})
    return rows


def is_within(planned_gb: float, measured_gb: float) -> bool:
    """Whether a plan is within 5 % or 0.5 GB of the measured peak."""
    return abs(planned_gb - measured_gb) <= max(TOLERANCE_GB, TOLERANCE * measured_gb)


def summary(rows: list[dict[str, Any]]) -> str:
    compared = [row["within"] for row in rows if "within" in row]
    return f"{sum(compared)} of {len(compared)} device phases within 5 % or 0.5 GB"


if __name__ == "__main__":
    main()
