"""What a process is doing, and which other processes it waits for: declared by its code, read by hang diagnosis.

All functions are thread-safe: the readers run in other threads than the work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from verl.utils.process_tree import why_not_running
from verl.utils.progress import pulse

# -------------------------------------------------------------------- long operations


@dataclass(frozen=True)
class Activity:
    """A long operation such as an engine's start: `what` it is, its current `step` if known, its age in seconds."""

    what: str
    step: str | None
    seconds: float

    @property
    def label(self) -> str:
        """Operation and step, without the time."""
        return f"{self.what}: {self.step}" if self.step else self.what

    def __str__(self) -> str:
        return f"{self.label} ({self.seconds:.0f} s)"


class _RunningActivity:
    def __init__(self, what: str, step: Callable[[], str | None]) -> None:
        self._what, self._step, self._start = what, step, time.monotonic()
        self._last_step: str | None = None

    def read(self) -> Activity:
        step = self._step() or self._last_step
        if step != self._last_step:
            self._last_step = step
            pulse()  # a new step is progress
        return Activity(self._what, step, time.monotonic() - self._start)


_activities: list[_RunningActivity] = []


@contextmanager
def activity(what: str, step: Callable[[], str | None] = lambda: None) -> Iterator[None]:
    """Declare a long operation of this process. `step()` returns its current step; it is called from other threads."""
    running = _RunningActivity(what, step)
    _activities.append(running)
    try:
        yield
    finally:
        _activities.remove(running)


def current_activity() -> Activity | None:
    """Return the innermost declared operation."""
    running = _activities.copy()
    return running[-1].read() if running else None


# -------------------------------------------------------------------- work outside of compute calls


@dataclass(frozen=True)
class BackgroundWork:
    """Unfinished work of this process outside of compute calls, such as a rollout job; reported like a call."""

    name: str
    """Text in hang reports."""
    since: float
    """`time.monotonic()` of its start."""
    thread: str
    """Name of the thread that does the work."""


WorkSource = Callable[[], BackgroundWork | None]
"""Returns the current work, or None."""

_work_sources: list[WorkSource] = []


def add_work_source(source: WorkSource) -> None:
    """Register a source of background work."""
    _work_sources.append(source)


def remove_work_source(source: WorkSource) -> None:
    """Unregister a source; unknown sources are ignored."""
    if source in _work_sources:
        _work_sources.remove(source)


def current_work() -> BackgroundWork | None:
    """Return the work of the first source that has any."""
    return next(filter(None, (source() for source in list(_work_sources))), None)


# -------------------------------------------------------------------- other processes

StoppedProcess = tuple[int, str]
"""(process id, why it cannot run: stopped or traced)."""

_helpers: dict[int, Callable[[], bool]] = {}
_peers: list[Callable[[], str | None]] = []


def add_helper(pid: int, is_awaited: Callable[[], bool]) -> None:
    """Register a local process; `is_awaited()` returns whether this process waits for it."""
    _helpers[pid] = is_awaited


def remove_helper(pid: int) -> None:
    """Unregister a process that has ended."""
    _helpers.pop(pid, None)


def stopped_helper() -> StoppedProcess | None:
    """Return a helper that this process waits for and that is stopped."""
    for pid, is_awaited in _helpers.copy().items():  # a copy: other threads add helpers
        if is_awaited() and (reason := why_not_running(pid)) in ("stopped", "traced"):
            return pid, reason
    return None


def add_peer(describe_silence: Callable[[], str | None]) -> None:
    """Register a remote peer; `describe_silence()` names it if it is awaited and has not answered for long."""
    _peers.append(describe_silence)


def remove_peer(describe_silence: Callable[[], str | None]) -> None:
    """Unregister a peer."""
    _peers.remove(describe_silence)


def silent_peer() -> str | None:
    """Return the description of a peer that this process waits for and that does not answer."""
    return next(filter(None, (describe() for describe in list(_peers))), None)
