"""What a run under faults shows from outside: the notes of its trainer, and its checkpoints, verified one by one."""

from __future__ import annotations

import itertools
import json
import statistics
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.utils.checkpoint.checkpoint_manager import CheckpointManager, reading
from verl.utils.checkpoint.manifest import read_manifest
from verl.utils.checkpoint.steps import step_of

_LOOK_S = 0.05
# What else there is in a step names folders and times.
_TENSORS = (".distcp", ".safetensors")
STARTING = ("start", "resume")


@dataclass(frozen=True, order=True)
class Place:
    """Where a run stands: a phase of a step; before all of them while it starts."""

    step: int
    number: int

    @classmethod
    def of(cls, note: dict[str, Any]) -> Place | None:
        """None while it starts, and for notes that begin no phase."""
        return cls(note["step"], note["number"]) if note.get("phase", "start") not in STARTING else None


class Notes:
    """The trainer's notes, read as they are written."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self.all: list[dict[str, Any]] = []

    def look(self) -> list[dict[str, Any]]:
        """Those that are new."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            lines = file.read()
        whole = lines[: lines.rfind(b"\n") + 1]
        self._read += len(whole)
        new = [json.loads(line) for line in whole.splitlines()]
        self.all += new
        return new

    @property
    def controller(self) -> int | None:
        """The process that noted last."""
        return self.all[-1]["pid"] if self.all else None

    def actor_ranks(self) -> list[int] | None:
        """Of the controller that noted last; None before they have started."""
        own = [note for note in self.all if note["pid"] == self.controller and "actor_ranks" in note]
        return own[-1]["actor_ranks"] if own else None

    def usual_seconds(self) -> dict[str, float]:
        """Of each phase, and of a step, the median."""
        taken: dict[str, list[float]] = defaultdict(list)
        phases = [note for note in self.all if "phase" in note]
        for note, after in itertools.pairwise(phases):
            if note["pid"] == after["pid"]:
                taken[note["phase"]].append(after["time"] - note["time"])
        steps = [note["time"] for note in phases if note["phase"] == "hand-over"]
        taken["step"] = [after - before for before, after in itertools.pairwise(steps)]
        return {phase: statistics.median(seconds) for phase, seconds in taken.items() if seconds}

    def answers(self) -> dict[str, list[str]]:
        """By step: what it was trained on; more than one where that was not the same each time the step was done."""
        found: dict[str, set[str]] = defaultdict(set)
        for note in self.all:
            if "answers" in note:
                found[str(note["step"])].add(note["answers"])
        return {step: sorted(digests) for step, digests in found.items()}


@dataclass
class Saved:
    """A step as it was when it appeared; `tensors`: size and checksum of the files that hold any."""

    serial: int
    tensors: dict[str, list[int]]


@dataclass
class Undisturbed:
    """What a run without faults did: the answers of each step, what it saved, and how long its phases take."""

    answers: dict[str, list[str]]
    tensors: dict[str, dict[str, list[int]]]
    usual_seconds: dict[str, float]

    @classmethod
    def of(cls, notes: Notes, checkpoints: Checkpoints) -> Undisturbed:
        """By step, as text: JSON knows no other keys."""
        saved = {str(step): it.tensors for step, it in sorted(checkpoints.saved.items())}
        return cls(notes.answers(), saved, notes.usual_seconds())


@dataclass
class Checkpoints:
    """Verifies every step folder from a thread, as it appears; all that were not whole are in `broken`."""

    root: Path
    saved: dict[int, Saved] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    verified: int = 0

    def __post_init__(self) -> None:
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="checkpoints", daemon=True)
        self._thread.start()

    def newest(self, now: bool = True) -> int:
        """The last whole step that is there (`now`: at this moment, not some milliseconds ago); 0: there is none."""
        if now:
            self._look()
        return max(self.saved, default=0)

    def saving(self) -> Path | None:
        """The folder of a step that is being written now."""
        return next(iter(self.root.glob(".global_step_*.tmp-*")), None)

    def close(self) -> None:
        self._done.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._done.wait(_LOOK_S):
            self._look()

    def _look(self) -> None:
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
            tensors = {name: [it.size, it.crc32] for name, it in files.items() if Path(name).suffix in _TENSORS}
            self.saved[step] = Saved(serial, tensors)
        elif folder.exists():  # else it was deleted while we looked: older ones go
            self.broken |= {f"{folder.name}: {'; '.join(problems)}"}
