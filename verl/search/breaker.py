"""A circuit breaker: after failures in a row nobody is asked for a while; then one request tries whether it is over."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["CircuitBreaker"]


class CircuitBreaker:
    """closed (all may ask) → open after `failures` in a row → half-open after `cooldown_s`: one probe decides.

    `allow` asks for leave, and whoever got it says `succeeded` or `failed`, or `abandoned` if it never came to know.
    """

    def __init__(self, failures: int = 5, cooldown_s: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._cooldown, self._clock = failures, cooldown_s, clock
        self._in_a_row = 0
        self._opened: float | None = None
        self._probing = False

    @property
    def state(self) -> str:
        """closed, open or half-open."""
        if self._opened is None:
            return "closed"
        return "half-open" if self._probing or self.waits() == 0 else "open"

    def waits(self) -> float:
        """Seconds until somebody may try again."""
        return 0.0 if self._opened is None else max(0.0, self._opened + self._cooldown - self._clock())

    def allow(self) -> bool:
        """Whether a request may be sent; in the half-open state one at a time."""
        if self._opened is None:
            return True
        if self._probing or self.waits() > 0:
            return False
        self._probing = True
        return True

    def succeeded(self) -> None:
        """An answer came: everything is as before."""
        self._in_a_row, self._opened, self._probing = 0, None, False

    def failed(self) -> None:
        """No answer came. A probe that fails begins another wait."""
        self._in_a_row += 1
        if self._probing or (self._opened is None and self._in_a_row >= self._limit):
            self._opened = self._clock()
        self._probing = False

    def abandoned(self) -> None:
        """Whoever had leave went away: the next one may probe."""
        self._probing = False
