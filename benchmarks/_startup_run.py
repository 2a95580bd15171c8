"""Measures a command: seconds to its first training step, start-up phases, CPU time of all its processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PHASE = re.compile(r"start-up: (?P<name>[A-Za-z ]+?) (?:(?P<minutes>[0-9]+) min )?(?P<seconds>[0-9.]+) s\b(?! so far)")
_MARK = "VERL_STARTUP_BENCHMARK"
_SAMPLE_S, _POLL_S = 0.2, 0.05
_TICKS = os.sysconf("SC_CLK_TCK")
# Names of processes by a part of their command line, first match.
_PROCESSES = (
    ("raylet/main", "raylet"),
    ("gcs_server", "Ray GCS"),
    ("raylet", "raylet"),
    ("ray::IDLE", "idle Ray workers"),
    ("ray::RayRankHost", "ranks"),
    ("RayRankHost", "ranks"),
    ("ray::TaskRunner", "controller"),
    ("TaskRunner", "controller"),
    ("runtime_env/agent", "Ray agents"),
    ("dashboard", "Ray agents"),
    ("ray/_private", "other Ray processes"),
    ("ray::", "other Ray processes"),
    ("fork_server", "scorers"),
    ("process_pool", "scorers"),
    ("main_sft", "warm start"),
    ("main_ppo", "driver"),
    ("quickstart/run.py", "quick start"),
)


@dataclass
class Measurement:
    """Result of one command."""

    step_1: float | None = None
    """Seconds to the first metrics of a training step."""
    total: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    """User and system seconds by kind of process until the end."""

    def add_parts(self, phases: Iterable[tuple[str, float]], prefix: str = "") -> None:
        """Add the seconds of phases; seconds of phases with the same name are summed."""
        for name, seconds in phases:
            self.parts[prefix + name] = self.parts.get(prefix + name, 0.0) + seconds


class ProcessSampler(threading.Thread):
    """Records the CPU time of all processes whose environment contains a mark, also of those that were reparented."""

    def __init__(self, mark: str) -> None:
        super().__init__(daemon=True)
        self._mark, self._done = f"{_MARK}={mark}".encode(), threading.Event()
        self._known: dict[int, bool] = {}
        self._seconds: dict[int, tuple[str, float]] = {}

    def run(self) -> None:
        while not self._done.wait(_SAMPLE_S):
            for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
                if self._known.get(pid) or self._has_mark(pid):
                    self._sample(pid)

    def stop(self) -> dict[str, float]:
        """End the thread; return CPU seconds by kind of process."""
        self._done.set()
        self.join()
        result: dict[str, float] = {}
        for name, seconds in self._seconds.values():
            result[name] = result.get(name, 0.0) + seconds
        return dict(sorted(result.items(), key=lambda item: -item[1]))

    def _has_mark(self, pid: int) -> bool:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False
        if self._mark in environment.split(b"\0"):
            self._known[pid] = True
            return True
        return False

    def _sample(self, pid: int) -> None:
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return
        if line:  # empty for a process that has ended
            name = next((name for part, name in _PROCESSES if part in line), "others")
            self._seconds[pid] = (name, (int(fields[11]) + int(fields[12])) / _TICKS)


def measure(command: Sequence[str], folder: Path, metrics: Path, environment: dict[str, str]) -> Measurement:
    """Run a command with its output in a log file in `folder`. `metrics`: the file to which it writes its metrics."""
    mark = uuid.uuid4().hex
    metrics.unlink(missing_ok=True)
    result, sampler = Measurement(), ProcessSampler(mark)
    sampler.start()
    log = folder / "output.log"
    begin = time.monotonic()
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, cwd=folder, stdout=stream, stderr=subprocess.STDOUT, env={**environment, _MARK: mark}
        )
    try:
        while process.poll() is None:
            if result.step_1 is None and any("step" in record for record in _training_records(metrics)):
                result.step_1 = time.monotonic() - begin
            time.sleep(_POLL_S)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        result.total = time.monotonic() - begin
        result.cpu = sampler.stop()
    if process.returncode:
        raise SystemExit(
            f"{command[1:3]} exited with {process.returncode}; last lines of {log}:\n{log.read_text()[-3000:]}"
        )
    result.add_parts(logged_phases(log.read_text()))
    for record in _training_records(metrics)[:1]:
        data = record["data"]
        names = {"step": "timing_s/step", "generate": "timing_s/gen", "update": "timing_s/update_actor"}
        result.parts |= {f"step 1: {name}": data[key] for name, key in names.items() if key in data}
    return result


def _training_records(metrics: Path) -> list[dict[str, Any]]:
    if not metrics.exists():
        return []
    lines = [line for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    records = [json.loads(line) for line in lines]
    return [record for record in records if "training/global_step" in record["data"] or "train/loss" in record["data"]]


def logged_phases(text: str) -> Iterator[tuple[str, float]]:
    """Yield name and seconds of the start-up phases in a log."""
    for phase in _PHASE.finditer(text):
        yield phase["name"], 60.0 * int(phase["minutes"] or 0) + float(phase["seconds"])
