"""Spans: when this process computed and when its engine generated, kept until the recording of the run collects them.

All functions are thread-safe.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

__all__ = ["GENERATING", "BusySpans", "Span", "span", "take_spans"]

GENERATING = "generating"
"""Name of the spans in which an engine has requests."""
# Spans of a process that nothing collects are overwritten.
_MAX_SPANS = 2000
# A longer busy span is reported in parts, so that a live view shows it.
_MAX_BUSY_S = 20.0


class Span(NamedTuple):
    """Name, begin and end of an operation, in seconds since 1970."""

    name: str
    start: float
    end: float


_spans: deque[Span] = deque(maxlen=_MAX_SPANS)


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
        if self._busy and (not busy or now - self._since > _MAX_BUSY_S):
            _spans.append(Span(self._name, self._since, now))
            self._since = now
        elif busy and not self._busy:
            self._since = now
        self._busy = busy
