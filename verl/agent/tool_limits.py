"""What bounds a tool call: how many at once and per second, and how much of the answer the model sees."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

_CUT = "...(truncated)..."


class LimitError(Exception):
    """A call got no place in time."""


class Rate:
    """At most `per_second` starts per second on average, and as many at once after a pause."""

    def __init__(self, per_second: float) -> None:
        self.per_second = per_second
        self._burst = max(per_second, 1.0) / per_second
        self._full_at = 0.0

    def delay(self, now: float) -> float:
        """Take a start; how long to wait for it."""
        self._full_at = max(self._full_at, now) + 1 / self.per_second
        return max(0.0, self._full_at - now - self._burst)

    def give_back(self) -> None:
        """The start that was taken last is not used."""
        self._full_at -= 1 / self.per_second


class Gate:
    """The limits of a tool's `config`, for all trajectories of a loop worker: `rate_limit` calls start per second,
    `num_workers` run at a time. Missing: no limit.
    """

    def __init__(self, limits: Mapping[str, Any]) -> None:
        rate, workers = limits.get("rate_limit"), limits.get("num_workers")
        for name, value in (("rate_limit", rate), ("num_workers", workers)):
            if value is not None and (not isinstance(value, (int, float)) or value <= 0):
                raise ValueError(f"{name}: {value!r} is not a number above 0.")
        self._rate = None if rate is None else Rate(rate)
        self._places = None if workers is None else asyncio.Semaphore(max(1, int(workers)))

    @asynccontextmanager
    async def place(self, seconds: float) -> AsyncIterator[None]:
        """Hold a place; LimitError when none came free within `seconds`."""
        try:
            if self._places is not None:
                await asyncio.wait_for(self._places.acquire(), seconds)
        except (TimeoutError, asyncio.TimeoutError) as error:  # two classes before Python 3.11
            raise LimitError(f"too many calls at once; none ended within {seconds:g} s") from error
        try:
            await self._wait_for_start(seconds)
            yield
        finally:
            if self._places is not None:
                self._places.release()

    async def _wait_for_start(self, seconds: float) -> None:
        if self._rate is None:
            return
        delay = self._rate.delay(time.monotonic())
        if delay > seconds:
            self._rate.give_back()
            raise LimitError(f"more than {self._rate.per_second:g} calls per second; no start within {seconds:g} s")
        if delay:
            await asyncio.sleep(delay)


def truncated(text: str, length: int, side: str) -> str:
    """`length` characters of a longer text and a mark: `left` keeps its beginning, `right` its end, `middle` both."""
    if len(text) <= length:
        return text
    if side == "left":
        return text[:length] + _CUT.rstrip(".")
    if side == "right":
        return _CUT.lstrip(".") + text[-length:]
    tail = length // 2
    return text[: length - tail] + _CUT + text[len(text) - tail :]
