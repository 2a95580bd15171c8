"""Work that a process does beside its compute calls, such as a rollout job: hang diagnosis reports it like a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Work", "add_work", "current_work", "remove_work"]


@dataclass(frozen=True)
class Work:
    """Unfinished work of this process."""

    name: str
    """As hang reports show it."""
    since: float
    """`time.monotonic()` of its start."""
    thread: str
    """Name of the thread that does it."""


Source = Callable[[], Work | None]
"""The current work, from any thread; None: there is none."""

_sources: list[Source] = []


def add_work(source: Source) -> None:
    """Let hang diagnosis ask `source` from now on."""
    _sources.append(source)


def remove_work(source: Source) -> None:
    """End `add_work`; unknown sources are ignored."""
    if source in _sources:
        _sources.remove(source)


def current_work() -> Work | None:
    """The work of the first source that has any."""
    return next(filter(None, (source() for source in list(_sources))), None)
