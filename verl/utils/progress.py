"""Progress: how far a call has come. Loops count as they go, and the caller reads from any thread.

`counted_by(progress)` is put around the call; the loops in it say `expect(rows)` and `tick(rows)` without being handed
anything. Outside of a counted call both do nothing.
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
    """Something moves in this process that is counted nowhere: a portion of a file was written or read."""
    global _pulses
    _pulses += 1


def pulses() -> int:
    """How often, so far: as long as this changes, the process does not hang."""
    return _pulses


@contextmanager
def moving(seconds: float) -> Iterator[None]:
    """What is done inside moves, for so long at most: it waits for others, of whom nothing is counted here."""
    over, deadline = threading.Event(), time.monotonic() + seconds

    def run() -> None:
        while not over.wait(_PULSE_S) and time.monotonic() < deadline:
            pulse()

    threading.Thread(target=run, name="moving", daemon=True).start()
    try:
        yield
    finally:
        over.set()


class Progress:
    """Units of work (samples) done, and to do as far as is known.

    `share` is the part of them that the whole group counts: less than 1 where rows only fill up a rank, 0 on a rank
    that does the same rows as another.
    """

    def __init__(self, share: float = 1.0) -> None:
        self._share = share
        self._done = self._total = 0
        self._lock = threading.Lock()

    def expect(self, units: int) -> None:
        """So many more are to do."""
        with self._lock:
            self._total += units

    def tick(self, units: int = 1) -> None:
        """So many more are done."""
        with self._lock:
            self._done += units

    @property
    def done(self) -> int:
        """Units done here, counted by the group or not."""
        return self._done

    def read(self) -> tuple[int, int]:
        """(done, total)"""
        return round(self._done * self._share), round(self._total * self._share)


_current: contextvars.ContextVar[Progress | None] = contextvars.ContextVar("verl_progress", default=None)


@contextmanager
def counted_by(progress: Progress) -> Iterator[None]:
    """What this thread does inside is counted there."""
    token = _current.set(progress)
    try:
        yield
    finally:
        _current.reset(token)


def expect(units: int) -> None:
    """The call that runs has so many more units to do."""
    progress = _current.get()
    if progress is not None:
        progress.expect(units)


def tick(units: int = 1) -> None:
    """The call that runs has done so many more."""
    progress = _current.get()
    if progress is not None:
        progress.tick(units)


def counted(futures: Iterable[Future[T]], total: int) -> list[Future[T]]:
    """The futures of `total` units, each of which is done when its future is, in whichever thread that happens."""
    progress = _current.get()
    if progress is None:
        return list(futures)
    progress.expect(total)
    taken = []
    for future in futures:
        future.add_done_callback(lambda _: progress.tick())
        taken.append(future)
    return taken
