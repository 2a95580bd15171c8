"""PromptStream: prompts epoch after epoch; those that a step took and did not use come first in the next."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from verl.protocol import DataProto

logger = logging.getLogger(__name__)


class PromptStream:
    """Draws whole batches from a dataloader and hands out any number of prompts.

    Its state, beside the dataloader's own position, is the prompts that wait: a resumed run goes on with the prompt
    that an uninterrupted one would take next, none is lost and none comes twice.
    """

    def __init__(self, dataloader: Any, total_epochs: int) -> None:
        self._dataloader = dataloader
        self._total_epochs = total_epochs
        self._iterator: Iterator[Any] | None = None
        self._drawn = 0  # batches, over all epochs
        self._waiting: DataProto | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the batch drawn last, from 0."""
        return max(0, self._drawn - 1) // self._per_epoch

    @property
    def waiting(self) -> int:
        """Prompts that were drawn or put back and are not handed out yet."""
        return 0 if self._waiting is None else len(self._waiting)

    def take(self, count: int) -> DataProto:
        """The next `count` prompts."""
        while self.waiting < count:
            drawn = self._draw()
            self._waiting = drawn if self._waiting is None else DataProto.concat([self._waiting, drawn])
        assert self._waiting is not None
        taken, rest = self._waiting[:count], self._waiting[count:]
        self._waiting = rest if len(rest) else None
        return taken

    def put_back(self, prompts: DataProto) -> None:
        """Prompts that were taken and are to be handed out again, before all others."""
        self._waiting = prompts if self._waiting is None else DataProto.concat([prompts, self._waiting])

    def state_dict(self) -> dict[str, Any]:
        """Plain data; the dataloader's position is saved with the dataloader."""
        waiting = None
        if self._waiting is not None:
            waiting = {"tensors": dict(self._waiting.batch.items()), "arrays": dict(self._waiting.non_tensor_batch)}
        return {"drawn": self._drawn, "waiting": waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._iterator, self._drawn = None, int(state["drawn"])
        waiting = state["waiting"]
        self._waiting = None if waiting is None else DataProto.from_dict(waiting["tensors"], waiting["arrays"])

    @property
    def _per_epoch(self) -> int:
        return max(1, len(self._dataloader))

    def _draw(self) -> DataProto:
        rows = None if self._iterator is None else next(self._iterator, None)
        if rows is None:
            self._iterator = iter(self._dataloader)
            epoch = self._drawn // self._per_epoch + 1
            logger.info("Epoch %d/%d", epoch, max(epoch, self._total_epochs))
            rows = next(self._iterator, None)
        if rows is None:
            raise ValueError("data.sampler: an epoch without a single whole batch. Make it yield more rows.")
        self._drawn += 1
        return DataProto.from_single_dict(rows)
