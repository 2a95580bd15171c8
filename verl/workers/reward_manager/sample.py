"""Sample in, Score out; and where scores go that a pool owes somebody: a future, or a list to wait for."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl.utils.progress import tick

_TICK_SECONDS = 0.5


@dataclass(frozen=True)
class Sample:
    """One answer to score; the fields are what a reward function is called with."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """What a reward function said: its value and further fields; or why there is none (the value is then 0).

    `kind` of an error: raised, invalid (no finite number), memory, timeout or died (the process).
    """

    value: float
    extra: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    kind: str | None = None


class Results(Protocol):
    """Where the scores of a call to the pool go."""

    def put(self, index: int, score: Score) -> None: ...
    def abandon(self, error: Exception) -> None: ...


@dataclass
class Task:
    """A sample on its way through the pool."""

    payload: bytes  # pickled arguments
    results: Results
    index: int
    again: bool = False  # its first try may have failed for what others did


class One:
    """A future gets the one score there is."""

    def __init__(self, future: Future[Score]) -> None:
        self._future = future

    def put(self, index: int, score: Score) -> None:
        self._future.set_result(score)

    def abandon(self, error: Exception) -> None:
        self._future.set_exception(error)


class Many:
    """A list for `wait`; as they come, the scores are counted as progress of the thread that waits."""

    def __init__(self, count: int) -> None:
        self._scores: list[Score | None] = [None] * count
        self._missing = count
        self._error: Exception | None = None
        self._done = threading.Event()
        if not count:
            self._done.set()

    def put(self, index: int, score: Score) -> None:
        self._scores[index] = score
        self._missing -= 1
        if not self._missing:
            self._done.set()

    def abandon(self, error: Exception) -> None:
        self._error = error
        self._done.set()

    def wait(self) -> list[Score]:
        told, total = 0, len(self._scores)
        while not self._done.wait(_TICK_SECONDS):
            done = total - self._missing
            tick(done - told)
            told = done
        tick(total - told)
        if self._error is not None:
            raise self._error
        return [score for score in self._scores if score is not None]
