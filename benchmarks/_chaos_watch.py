"""Observe a run under faults: its phase log, its checkpoints (verified when they appear) and its processes."""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import threading
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.utils.checkpoint.checkpoint_manager import CheckpointManager, reading
from verl.utils.checkpoint.folders import step_of
from verl.utils.checkpoint.manifest import read_manifest
from verl.utils.process_tree import children, with_descendants

_POLL_S = 0.05
# Other files contain paths and times, which differ between runs.
_TENSORS = (".distcp", ".safetensors")
STARTING = ("start", "resume")


@dataclass(frozen=True, order=True)
class Position:
    """Progress of a run: step and number of the phase."""

    step: int
    number: int

    @classmethod
    def of(cls, entry: dict[str, Any]) -> Position | None:
        """None during the start, and for entries that begin no phase."""
        return cls(entry["step"], entry["number"]) if entry.get("phase", "start") not in STARTING else None


class PhaseLog:
    """The phase log of the trainer, read incrementally."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.all: list[dict[str, Any]] = []

    def read_new(self) -> list[dict[str, Any]]:
        """Return the entries written since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            lines = file.read()
        complete = lines[: lines.rfind(b"\n") + 1]
        self._offset += len(complete)
        new = [json.loads(line) for line in complete.splitlines()]
        self.all += new
        return new

    @property
    def controller(self) -> int | None:
        """Pid of the process that wrote last."""
        return self.all[-1]["pid"] if self.all else None

    def actor_ranks(self) -> list[int] | None:
        """Pids of the current controller's actor ranks; None before they have started."""
        starts = [entry for entry in self.all if entry["pid"] == self.controller and "actor_ranks" in entry]
        return starts[-1]["actor_ranks"] if starts else None

    def usual_seconds(self) -> dict[str, float]:
        """Median duration of each phase and of a step."""
        durations: dict[str, list[float]] = defaultdict(list)
        phases = [entry for entry in self.all if "phase" in entry]
        for entry, after in itertools.pairwise(phases):
            if entry["pid"] == after["pid"]:
                durations[entry["phase"]].append(after["time"] - entry["time"])
        steps = [entry["time"] for entry in phases if entry["phase"] == "weight sync"]
        durations["step"] = [after - before for before, after in itertools.pairwise(steps)]
        return {phase: statistics.median(seconds) for phase, seconds in durations.items() if seconds}

    def rollout_digests(self) -> dict[str, list[str]]:
        """By step: digests of its training data; several if repetitions of the step differ."""
        digests: dict[str, set[str]] = defaultdict(set)
        for entry in self.all:
            if "rollout_digest" in entry:
                digests[str(entry["step"])].add(entry["rollout_digest"])
        return {step: sorted(values) for step, values in digests.items()}


@dataclass
class SavedStep:
    """A saved step, as first seen; `tensors`: size and checksum of its tensor files."""

    serial: int
    tensors: dict[str, list[int]]


@dataclass
class ReferenceRun:
    """A run without faults: data of each step, saved tensors, and durations of phases."""

    rollout_digests: dict[str, list[str]]
    tensors: dict[str, dict[str, list[int]]]
    usual_seconds: dict[str, float]

    @classmethod
    def of(cls, phase_log: PhaseLog, checkpoints: Checkpoints) -> ReferenceRun:
        """Keys are steps as strings, for JSON."""
        saved = {str(step): saved.tensors for step, saved in sorted(checkpoints.saved.items())}
        return cls(phase_log.rollout_digests(), saved, phase_log.usual_seconds())


@dataclass
class Checkpoints:
    """Verifies every step folder in a thread when it appears; incomplete ones are listed in `incomplete`."""

    root: Path
    saved: dict[int, SavedStep] = field(default_factory=dict)
    incomplete: set[str] = field(default_factory=set)
    verified: int = 0

    def __post_init__(self) -> None:
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="checkpoints", daemon=True)
        self._thread.start()

    def newest(self, now: bool = True) -> int:
        """The newest complete step, 0 if there is none; `now`: check the folder first."""
        if now:
            self._verify_new()
        return max(self.saved, default=0)

    def saving(self) -> Path | None:
        """The folder of a step that is being written."""
        return next(iter(self.root.glob(".global_step_*.tmp-*")), None)

    def close(self) -> None:
        self._done.set()
        self._thread.join()
        self._verify_new()

    def _watch(self) -> None:
        while not self._done.wait(_POLL_S):
            self._verify_new()

    def _verify_new(self) -> None:
        with self._lock:
            for folder in sorted(self.root.glob("global_step_*")):
                step = step_of(folder.name)
                if step is not None:
                    self._check(folder, step)

    def _check(self, folder: Path, step: int) -> None:
        try:
            serial = read_manifest(folder).serial
            if step in self.saved and self.saved[step].serial == serial:
                return
            with reading(folder):
                problems = CheckpointManager.verify(folder)
                files = read_manifest(folder).files
        except (ValueError, OSError) as error:
            problems, files, serial = [str(error)], {}, -1
        if not problems:
            self.verified += 1
            tensors = {
                name: [entry.size, entry.crc32] for name, entry in files.items() if Path(name).suffix in _TENSORS
            }
            self.saved[step] = SavedStep(serial, tensors)
        elif folder.exists():  # otherwise the retention policy deleted it during the check
            self.incomplete |= {f"{folder.name}: {'; '.join(problems)}"}


_PROGRAM = "verl.trainer.main_ppo"
_FORK_SERVER = "verl.utils.process_pool.fork_server"
_RAY_OTHERS = ("dashboard.py", "log_monitor.py", "monitor.py", "ray::DashboardAgent", "ray::RuntimeEnvAgent")


def by_kind(first: int, actor_ranks: Collection[int] | None) -> dict[str, list[int]]:
    """Pids by kind, from ancestry and command line.

    `first`: the process that the user started; `actor_ranks`: pids of ranks with training state.
    """
    pids: dict[str, list[int]] = defaultdict(list)
    for pid in with_descendants(first):
        kind = _kind(pid, first, actor_ranks)
        if kind is not None:
            pids[kind].append(pid)
    if "driver" not in pids:
        pids["driver"] = pids.pop("supervisor", [])
    return dict(pids)


def _kind(pid: int, first: int, actor_ranks: Collection[int] | None) -> str | None:
    words = command_line(pid)
    line = " ".join(words)
    if not words or state_of(pid) == "Z":
        return None
    if pid == first:
        return "supervisor"
    if words[1:3] == ["-m", _PROGRAM]:
        return "driver" if parent_of(pid) == first else None
    if line.startswith("ray::RayRankHost"):
        return "rank" if actor_ranks is None or pid in actor_ranks else "replica"
    if line.startswith("ray::TaskRunner"):
        return "controller"
    if _FORK_SERVER in line:
        return "scorer" if _FORK_SERVER in " ".join(command_line(parent_of(pid))) else "fork server"
    if Path(words[0]).name in ("gcs_server", "raylet"):
        return {"gcs_server": "GCS", "raylet": "raylet"}[Path(words[0]).name]
    if any(name in line for name in _RAY_OTHERS):
        return "other Ray process"
    return None


def command_line(pid: int) -> list[str]:
    """The command line of a process; [] if it does not exist."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def parent_of(pid: int) -> int:
    return int((_stat(pid) or ["", "0"])[1])


def state_of(pid: int) -> str | None:
    """R, S, D, T (stopped), Z (zombie); None if it does not exist."""
    return (_stat(pid) or [None])[0]


def identity(pid: int) -> tuple[int, str] | None:
    """Identifies a process even if its pid is reused later."""
    fields = _stat(pid)
    return None if fields is None or fields[0] == "Z" else (pid, fields[19])


def send(pid: int, number: signal.Signals) -> bool:
    """Send a signal; return whether the process existed."""
    if state_of(pid) in (None, "Z"):
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def leftover_processes(before: Collection[int]) -> list[str]:
    """Processes that a finished run left running (adopted by this process); `before`: its own children."""
    for pid in children(os.getpid()):
        if pid not in before and state_of(pid) == "Z":
            os.waitpid(pid, 0)
    orphans = [pid for pid in children(os.getpid()) if pid not in before and state_of(pid) not in (None, "Z")]
    return [f"{pid} {' '.join(command_line(pid))[:80]}" for child in orphans for pid in with_descendants(child)]


def _stat(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
