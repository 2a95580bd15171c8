"""Work of a process outside of compute calls, such as a rollout job, which hang diagnosis reports like a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Work", "add_work", "current_work", "remove_work"]


@dataclass(frozen=True)
class Work:
    """Unfinished work of this process."""

    name: str
    """Text in hang reports."""
    since: float
    """`time.monotonic()` of its start."""
    thread: str
    """Name of the thread that does the work."""


Source = Callable[[], Work | None]
"""Returns the current work, or None. Thread-safe."""

_sources: list[Source] = []


def add_work(source: Source) -> None:
    """Register a source of work for hang diagnosis."""
    _sources.append(source)


def remove_work(source: Source) -> None:
    """Unregister a source; unknown sources are ignored."""
    if source in _sources:
        _sources.remove(source)


def current_work() -> Work | None:
    """The work of the first source that has any."""
    return next(filter(None, (source() for source in list(_sources))), None)
