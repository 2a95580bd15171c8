"""InFlight: the names of requested trajectories that have not finished."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

__all__ = ["InFlight"]


class InFlight:
    """A set of names with a callback. Thread-safe. Removing a name twice has no effect: a trajectory may finish in a
    collecting thread while the trainer drops its group."""

    def __init__(self, on_change: Callable[[int], None]) -> None:
        """`on_change` receives the number of names after every change, under the lock."""
        self._names: set[str] = set()
        self._on_change: Callable[[int], None] | None = on_change
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._names)

    def add(self, names: Iterable[str]) -> None:
        """Add trajectories that were requested."""
        with self._lock:
            self._names.update(names)
            self._report()

    def remove(self, names: Iterable[str]) -> None:
        """Remove trajectories that finished or were dropped; unknown names are ignored."""
        with self._lock:
            self._names.difference_update(names)
            self._report()

    def close(self) -> None:
        """Report no further changes: threads of a closed stream must not change the counts of the next one."""
        with self._lock:
            self._on_change = None

    def _report(self) -> None:
        if self._on_change is not None:
            self._on_change(len(self._names))
