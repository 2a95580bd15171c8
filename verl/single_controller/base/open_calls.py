"""The calls on worker groups that are not answered yet: what a controller that stands still is waiting for."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any


class OpenCall:
    """A compute call of a group. Whoever holds its future holds this; `given_up` is raised by who waits for it."""

    def __init__(self, group: Any, method: str) -> None:
        self.group, self.method = group, method
        self.thread, self.start = threading.get_ident(), time.monotonic()
        self.given_up: Exception | None = None
        with _lock:
            _counts["made"] += 1
            _open.add(self)

    def close(self) -> None:
        """It was answered."""
        with _lock:
            _counts["closed"] += 1
            _open.discard(self)


_open: weakref.WeakSet[OpenCall] = weakref.WeakSet()
_lock = threading.Lock()
_counts = {"made": 0, "closed": 0}


def open_calls() -> list[OpenCall]:
    """Those of this process, the oldest first."""
    with _lock:
        return sorted(_open, key=lambda call: call.start)


def calls_so_far() -> int:
    """How many were made and answered: a number that stands still while the controller does."""
    return _counts["made"] + _counts["closed"]
