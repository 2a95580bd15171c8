"""How long is too long: a limit for every phase from what it took lately, and ranks for which others wait. Pure."""

from __future__ import annotations

import math
from collections import defaultdict, deque

# A phase whose name begins so starts processes and loads models, as the run did before its first phase.
RESTART = "restart of "
# Compiling for a new shape, a slow disk, a validation of long answers: less than this is no hang.
_LEAST_S = 300.0
_UNKNOWN_S = 1800.0
_TIMES = 5.0
_RECENT = 10
# Whoever is stopped, or gone, comes to nothing by itself.
_STANDSTILL_S = 60.0
_SLOW_SHARE = 0.25
_SLOW_STEPS = 3


class HangLimits:
    """Seconds without progress. `timeout` holds for all phases if it is given.

    `load`: factor for limits of start-up on a busy machine (`machine_load.load_factor`).
    """

    def __init__(self, timeout: float | None, load: float = 1.0) -> None:
        self._timeout, self._start = timeout, _LEAST_S * load
        self._took: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_RECENT))

    def took(self, phase: str, seconds: float) -> None:
        """A phase has ended."""
        self._took[phase].append(seconds)

    def limit(self, phase: str, kind: str = "") -> float:
        """Of a phase in which the verdict is of this kind."""
        if kind == "traced":
            return math.inf  # somebody looks at it
        stands = kind in ("stopped", "dead")  # that process cannot run at all
        if self._timeout is not None:
            # Starting processes and loading models says nothing of what phases take.
            loads = phase.startswith(RESTART) or not (self._took or phase)
            starts = kind == "starting" or (loads and not stands)
            return max(self._timeout, self._start) if starts else self._timeout
        if stands:
            return _STANDSTILL_S
        if phase in self._took:
            return max(_LEAST_S, _TIMES * max(self._took[phase]))
        # Between phases: as long as the longest of them.
        return _UNKNOWN_S if phase or not self._took else max(map(self.limit, self._took))


class SlowRanks:
    """Seconds for which the others waited for one rank, step by step."""

    def __init__(self) -> None:
        self._waited: dict[str, float] = defaultdict(float)
        self._in_a_row: dict[str, int] = defaultdict(int)

    def seen(self, rank: str, seconds: float) -> None:
        """In this time the others waited for this rank."""
        self._waited[rank] += seconds

    def step_done(self, seconds: float) -> tuple[float, str | None]:
        """(the most that others waited for one rank in the step, which rank has been slow in several steps now)."""
        waited, self._waited = self._waited, defaultdict(float)
        slow = [rank for rank, time in waited.items() if time > _SLOW_SHARE * seconds]
        self._in_a_row = defaultdict(int, {rank: self._in_a_row[rank] + 1 for rank in slow})
        named = next((rank for rank, steps in self._in_a_row.items() if steps % _SLOW_STEPS == 0), None)
        return max(waited.values(), default=0.0), named
