"""What this process is doing, for status displays, hang detection and recordings. All functions are thread-safe.

- Progress of a call: the caller wraps the call into `record_progress(progress)`, and the loops in it use
  `expect(rows)` and `tick(rows)`, which need no reference to `progress`. Outside of a recorded call both do nothing.
  Work without units (a file being written) calls `pulse()`, which shows hang detection that the process makes progress.
- Spans: when this process computed and when its engine generated, kept until the recording of the run collects them.
- Liveness: long operations, background work, and the other processes that this one waits for.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from verl.utils.process_tree import why_not_running

T = TypeVar("T")

# ---------------------------------------------------------------- progress of a call

PULSE_S = 1.0
_pulses = 0


def pulse() -> None:
    """Record progress that is not counted in units, such as a written portion of a file."""
    global _pulses
    _pulses += 1


def pulse_count() -> int:
    """Return the number of pulses of this process: as long as it changes, the process does not hang."""
    return _pulses


@contextmanager
def pulsing(seconds: float) -> Iterator[None]:
    """Pulse every second while the block runs, for at most `seconds`: for waits on other processes."""
    finished, deadline = threading.Event(), time.monotonic() + seconds

    def run() -> None:
        while not finished.wait(PULSE_S) and time.monotonic() < deadline:
            pulse()

    threading.Thread(target=run, name="pulsing", daemon=True).start()
    try:
        yield
    finally:
        finished.set()


class Progress:
    """Finished and expected units of work (samples) of one rank.

    `share` is the part of its units that the whole group counts: below 1 if some of its rows are padding, 0 on a
    rank that processes the same rows as another one.
    """

    def __init__(self, share: float = 1.0) -> None:
        self._share = share
        self._done = self._total = 0
        self._lock = threading.Lock()

    def expect(self, units: int) -> None:
        """Add units to the total."""
        with self._lock:
            self._total += units

    def tick(self, units: int = 1) -> None:
        """Add finished units."""
        with self._lock:
            self._done += units

    @property
    def done(self) -> int:
        """Units finished on this rank, whatever its share."""
        return self._done

    def read(self) -> tuple[int, int]:
        """Return (done, total) as the group counts them."""
        return round(self._done * self._share), round(self._total * self._share)


_current: contextvars.ContextVar[Progress | None] = contextvars.ContextVar("verl_progress", default=None)


@contextmanager
def record_progress(progress: Progress) -> Iterator[None]:
    """Count the work of this thread inside the block in `progress`."""
    token = _current.set(progress)
    try:
        yield
    finally:
        _current.reset(token)


def expect(units: int) -> None:
    """Add units to the total of the current call."""
    progress = _current.get()
    if progress is not None:
        progress.expect(units)


def tick(units: int = 1) -> None:
    """Add finished units to the current call."""
    progress = _current.get()
    if progress is not None:
        progress.tick(units)


def count_futures(futures: Iterable[Future[T]], total: int) -> list[Future[T]]:
    """Return the futures of `total` units; each unit is counted when its future is done, in any thread."""
    progress = _current.get()
    if progress is None:
        return list(futures)
    progress.expect(total)
    counted = []
    for future in futures:
        future.add_done_callback(lambda _: progress.tick())
        counted.append(future)
    return counted


# ---------------------------------------------------------------- spans

GENERATING = "generating"
"""Name of the spans in which an engine has requests."""
# Maximum number of spans that are kept: if nothing collects them, the oldest are dropped.
MAX_SPANS = 2000
# A longer busy span is reported in parts, so that a live view shows it.
MAX_BUSY_S = 20.0


class Span(NamedTuple):
    """Name, begin and end of an operation, in seconds since 1970."""

    name: str
    start: float
    end: float


_spans: deque[Span] = deque(maxlen=MAX_SPANS)


@contextmanager
def span(name: str) -> Iterator[None]:
    """Record the time of the block."""
    start = time.time()
    try:
        yield
    finally:
        _spans.append(Span(name, start, time.time()))


def take_spans() -> list[Span]:
    """Return the spans that have ended since the last call, and forget them."""
    return [_spans.popleft() for _ in range(len(_spans))]


class BusySpans:
    """Records the spans in which a count is above 0; long ones in consecutive parts. The caller holds a lock."""

    def __init__(self, name: str) -> None:
        self._name, self._since = name, 0.0
        self._busy = False

    def set(self, count: int) -> None:
        """Set the current count."""
        now, busy = time.time(), count > 0
        if self._busy and (not busy or now - self._since > MAX_BUSY_S):
            _spans.append(Span(self._name, self._since, now))
            self._since = now
        elif busy and not self._busy:
            self._since = now
        self._busy = busy


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

work_sources: list[WorkSource] = []


def add_work_source(source: WorkSource) -> None:
    """Register a source of background work."""
    work_sources.append(source)


def remove_work_source(source: WorkSource) -> None:
    """Unregister a source; unknown sources are ignored."""
    if source in work_sources:
        work_sources.remove(source)


def current_work() -> BackgroundWork | None:
    """Return the work of the first source that has any."""
    return next(filter(None, (source() for source in list(work_sources))), None)


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
