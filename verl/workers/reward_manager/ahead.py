"""ScoresAhead: answers scored as they are finished, while others of their batch are still being generated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from verl.workers.reward_manager.sample import Sample, Score

Finished = Sequence[tuple[int, np.ndarray]]
"""(row of the batch, token ids of its answer)."""


class ScoresAhead:
    """`columns` are those of the rows to be answered, with `uid`; `describe` makes samples of answers.

    A score is found again by whose answer it is and by its tokens, so it goes to the right row whatever becomes of the
    batch in between.
    """

    def __init__(
        self,
        columns: Mapping[str, Any],
        describe: Callable[[Finished], list[Sample]],
        submit: Callable[[Sample], Future[Score]],
    ) -> None:
        self._uids = columns["uid"]
        self._describe, self._submit = describe, submit
        self._found: dict[tuple[Any, bytes], list[tuple[Sample, Future[Score]]]] = defaultdict(list)
        self.submitted = 0

    def add(self, finished: Finished) -> None:
        """Score these answers as soon as there is a free scorer."""
        if not finished:
            return
        for (row, tokens), sample in zip(finished, self._describe(finished), strict=True):
            self._found[self._key(self._uids[row], tokens)].append((sample, self._submit(sample)))
        self.submitted += len(finished)

    def take(self, uid: Any, tokens: Any) -> tuple[Sample, Future[Score]] | None:
        """The sample and its score to come, if this answer to this prompt was added and is not taken yet."""
        found = self._found.get(self._key(uid, tokens))
        return found.pop() if found else None

    @staticmethod
    def _key(uid: Any, tokens: Any) -> tuple[Any, bytes]:
        return uid, np.asarray(tokens, dtype=np.int64).tobytes()
