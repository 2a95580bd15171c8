"""Progress of a call: loops count units of work, and other threads read the counts.

The caller wraps the call into `record_progress(progress)`; loops inside call `expect(rows)` and `tick(rows)` without
any parameter passing. Outside of a recorded call both do nothing. Work without units (a file being written) calls
`pulse()`, which shows hang detection that the process makes progress.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

_PULSE_S = 1.0
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
        while not finished.wait(_PULSE_S) and time.monotonic() < deadline:
            pulse()

    threading.Thread(target=run, name="pulsing", daemon=True).start()
    try:
        yield
    finally:
        finished.set()


class Progress:
    """Finished and expected units of work (samples) of one rank.

    `share` is the part of its units that the whole group counts: below 1 if some rows only fill up the rank, 0 on a
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
