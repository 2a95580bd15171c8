"""The long operation that a process is running (such as an engine's start), for status lines and hang diagnosis."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from verl.utils.progress import pulse


@dataclass(frozen=True)
class Activity:
    """A long operation: `what` it is, its current `step` if known, and its age in seconds."""

    what: str
    step: str | None
    seconds: float

    @property
    def label(self) -> str:
        """Operation and step, without the time."""
        return f"{self.what}: {self.step}" if self.step else self.what

    def __str__(self) -> str:
        return f"{self.label} ({self.seconds:.0f} s)"


class _Running:
    def __init__(self, what: str, step: Callable[[], str | None]) -> None:
        self._what, self._step, self._start = what, step, time.monotonic()
        self._last_step: str | None = None

    def read(self) -> Activity:
        step = self._step() or self._last_step
        if step != self._last_step:
            self._last_step = step
            pulse()  # a new step is progress
        return Activity(self._what, step, time.monotonic() - self._start)


# Per process, not per thread: other threads read it.
_running: list[_Running] = []


@contextmanager
def activity(what: str, step: Callable[[], str | None] = lambda: None) -> Iterator[None]:
    """Declare a long operation of this process. `step()` returns its current step; it is called from other threads."""
    running = _Running(what, step)
    _running.append(running)
    try:
        yield
    finally:
        _running.remove(running)


def current_activity() -> Activity | None:
    """Return the innermost declared operation. Thread-safe."""
    running = _running.copy()
    return running[-1].read() if running else None
