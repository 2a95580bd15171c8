"""ScoresAhead: answers scored as they are finished, while others of their batch are still being generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from verl.workers.reward_manager.scorer import Sample, Score

# Where rows remember their place in the generation request, whatever becomes of the batch in between.
ROW = "row"
Finished = Sequence[tuple[int, np.ndarray]]
"""(row of the batch, token ids of its answer)."""


class ScoresAhead:
    """`describe` makes samples of answers. A score is found again by the row whose answer it is, never by what the
    answer says: two rows may say the same and deserve different scores."""

    def __init__(self, describe: Callable[[Finished], list[Sample]], submit: Callable[[Sample], Future[Score]]) -> None:
        self._describe, self._submit = describe, submit
        self._found: dict[int, tuple[np.ndarray, Sample, Future[Score]]] = {}
        self.submitted = 0

    def add(self, finished: Finished) -> None:
        """Score these answers as soon as there is a free scorer."""
        if not finished:
            return
        for (row, tokens), sample in zip(finished, self._describe(finished), strict=True):
            self._found[row] = tokens, sample, self._submit(sample)
        self.submitted += len(finished)

    def take(self, row: int, tokens: Any) -> tuple[Sample, Future[Score]] | None:
        """The row's sample and its score to come, if it was added and these are still the tokens of its answer."""
        found = self._found.pop(row, None)
        if found is None or not np.array_equal(found[0], tokens):
            return None
        return found[1], found[2]
