"""InFlight: the names of submitted trajectories that have not finished."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

__all__ = ["InFlight"]


class InFlight:
    """A thread-safe set of names with a callback. Removing a name twice has no effect: a collector thread may report a
    trajectory as finished while the trainer drops its group."""

    def __init__(self, on_change: Callable[[int], None]) -> None:
        """`on_change` receives the number of names after every change, under the lock."""
        self._names: set[str] = set()
        self._on_change: Callable[[int], None] | None = on_change
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._names)

    def add(self, names: Iterable[str]) -> None:
        """Add submitted trajectories."""
        with self._lock:
            self._names.update(names)
            self._report()

    def remove(self, names: Iterable[str]) -> None:
        """Remove trajectories that finished or were dropped; unknown names are ignored."""
        with self._lock:
            self._names.difference_update(names)
            self._report()

    def close(self) -> None:
        """Stop calling `on_change`: collector threads of a closed job must not change the count of the next one."""
        with self._lock:
            self._on_change = None

    def _report(self) -> None:
        if self._on_change is not None:
            self._on_change(len(self._names))
