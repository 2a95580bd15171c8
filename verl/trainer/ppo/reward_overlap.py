"""RewardOverlap: while answers are generated, those that are finished go to the reward manager."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from verl.protocol import DataProto, object_array
from verl.workers.reward_manager.ahead import ROW

logger = logging.getLogger(__name__)

# Often against what a generation takes, rarely against what asking costs the ranks (a millisecond).
_ASK_S = 0.1


class RewardOverlap:
    """Around a generation. A manager of the user's own that scores whole batches only is left alone."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self.share: float | None = None
        """Of the last generation's answers, those that were being scored when it ended; None: it was not watched."""

    @contextmanager
    def __call__(self, reward_fn: Any, group: Any, request: DataProto, batch: DataProto) -> Iterator[None]:
        """`request` goes to `group`; its rows are those of `batch`, which has the columns for the reward function.

        Both get a column that numbers the rows: by it the reward manager finds what it has scored already.
        """
        self.share = None
        can = self._enabled and hasattr(reward_fn, "score_ahead") and hasattr(group, "finished_samples")
        ahead = reward_fn.score_ahead(batch.non_tensor_batch) if can else None
        if ahead is None:
            yield
            return
        request.non_tensor_batch[ROW] = batch.non_tensor_batch[ROW] = object_array(list(range(len(request))))
        request.meta_info["tell_finished"] = True
        over = threading.Event()

        def keep_asking() -> None:
            try:
                while not over.wait(_ASK_S):
                    for finished in group.finished_samples():
                        ahead.add(finished)
            except Exception as error:  # noqa: BLE001 - said; what was not scored by now is scored after generation
                logger.warning("answers are not scored while others are generated: %r", error)

        asking = threading.Thread(target=keep_asking, name="reward-overlap", daemon=True)
        asking.start()
        try:
            yield
        finally:
            over.set()
            asking.join()
            self.share = ahead.submitted / max(1, len(request))
