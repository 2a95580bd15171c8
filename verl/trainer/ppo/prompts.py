"""Prompts epoch after epoch: in which order, and any number at a time; those first that a step took and did not use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from torch.utils.data import SequentialSampler

from verl.config import DataConfig
from verl.protocol import DataProto
from verl.trainer.common.loader import BatchLoader
from verl.trainer.ppo.arrange import concat_prompts
from verl.utils.dataset.rl_dataset import collate_fn as default_collate_fn
from verl.utils.dataset.sampler import AbstractCurriculumSampler, EpochSampler

logger = logging.getLogger(__name__)

# Seconds to wait at the end of a run for a batch that is still being fetched.
_LAST_FETCH_S = 10.0


def make_dataloader(
    dataset: Any,
    config: DataConfig,
    collate_fn: Callable[..., Any] | None = None,
    sampler: Any = None,
    batch_size: int | None = None,
) -> BatchLoader:
    """Training batches of `gen_batch_size` prompts in the sampler's order, incomplete last ones dropped; with
    `batch_size`, all rows in their own order."""
    training = batch_size is None
    size = config.gen_batch_size if batch_size is None else batch_size
    if training and len(dataset) < size:
        key = "data.gen_batch_size" if size != config.train_batch_size else "data.train_batch_size"
        raise ValueError(
            f"{key} = {size}: data.train_files hold only {len(dataset)} usable prompts."
            f" Set it to {len(dataset)} or less, or give more data."
        )
    if training and sampler is None:
        sampler = make_sampler(config, dataset)
    return BatchLoader(
        dataset,
        sampler if training else SequentialSampler(dataset),
        batch_size=size,
        drop_last=training,
        num_workers=config.dataloader_num_workers,
        collate_fn=collate_fn or default_collate_fn,
    )


def make_sampler(config: DataConfig, dataset: Any) -> EpochSampler:
    """Shuffled by `data.seed` every epoch, or in order; resumes where it stopped, at the end of an epoch too."""
    return EpochSampler(dataset, config.seed, config.shuffle, batch_size=config.gen_batch_size)


class PromptStream:
    """Draws whole batches from a dataloader and hands out any number of prompts.

    Its state, beside the dataloader's position, is the prompts that wait: a resumed run goes on with the prompt that an
    uninterrupted one would take next, none is lost and none comes twice. A batch that is only fetched is in neither.
    """

    def __init__(self, dataloader: Any, total_epochs: int) -> None:
        self._dataloader = dataloader
        self._total_epochs = total_epochs
        self._iterator: Iterator[Any] | None = None
        self._drawn = 0  # batches, over all epochs
        self._waiting: DataProto | None = None
        self._fetches_ahead = isinstance(dataloader, BatchLoader) and not dataloader.learns
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompts")
        self._fetched: Future[tuple[Any, bool]] | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the batch drawn last, from 0."""
        return max(0, self._drawn - 1) // self.batches_per_epoch

    @property
    def batches_per_epoch(self) -> int:
        """Of the dataloader."""
        return max(1, len(self._dataloader))

    @property
    def waiting(self) -> int:
        """Prompts that were drawn or put back and are not handed out yet."""
        return 0 if self._waiting is None else len(self._waiting)

    def take(self, count: int, prefetch: bool = True) -> DataProto:
        """The next `count` prompts; then begin to fetch the next batch, unless the caller calls `prefetch` later."""
        while self.waiting < count:
            drawn = self._draw()
            self._waiting = drawn if self._waiting is None else concat_prompts([self._waiting, drawn])
        assert self._waiting is not None
        taken, rest = self._waiting[:count], self._waiting[count:]
        self._waiting = rest if len(rest) else None
        if prefetch:
            self.prefetch()
        return taken

    def prefetch(self) -> None:
        """Begin to fetch the next batch of the dataloader in a thread, if that is possible and not done yet."""
        if self._fetches_ahead and self._fetched is None:
            self._fetched = self._thread.submit(self._next_rows)

    def put_back(self, prompts: DataProto) -> None:
        """Prompts that were taken and are to be handed out again, before all others."""
        self._waiting = prompts if self._waiting is None else concat_prompts([prompts, self._waiting])

    def reject(self, prompts: DataProto) -> None:
        """Prompts that were taken and taught nothing: they are used up."""

    def learn_from(self, batch: DataProto) -> None:
        """Show a finished batch to the dataloader's sampler, if that is one that learns."""
        sampler = getattr(self._dataloader, "sampler", None)
        if isinstance(sampler, AbstractCurriculumSampler):
            sampler.update(batch)

    def loader_state(self) -> dict[str, Any]:
        """The dataloader's position, to be saved beside `state_dict`: before what is fetched ahead."""
        fetched = self._fetched is not None and self._fetched.exception() is None
        return self._dataloader.state_dict(without_last=True) if fetched else self._dataloader.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Plain data; the dataloader's position is `loader_state`."""
        waiting = None
        if self._waiting is not None:
            waiting = {"tensors": dict(self._waiting.batch.items()), "arrays": dict(self._waiting.non_tensor_batch)}
        return {"drawn": self._drawn, "waiting": waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._iterator, self._fetched, self._drawn = None, None, int(state["drawn"])
        waiting = state["waiting"]
        self._waiting = None if waiting is None else DataProto.from_dict(waiting["tensors"], waiting["arrays"])

    def close(self) -> None:
        """At the end of a run: wait for the batch that is being fetched, and end the dataloader's worker processes.

        The wait is bounded: workers of a dataset that hangs end with this process.
        """
        if self._fetched is not None:
            wait([self._fetched], timeout=_LAST_FETCH_S)
        self._iterator = None
        if isinstance(self._dataloader, BatchLoader):
            self._dataloader.close()

    def _draw(self) -> DataProto:
        rows, new_epoch = self._next_rows() if self._fetched is None else self._fetched.result()
        self._fetched = None
        if new_epoch:
            epoch = self._drawn // self.batches_per_epoch + 1
            logger.info("Epoch %d/%d", epoch, max(epoch, self._total_epochs))
        self._drawn += 1
        return DataProto.from_single_dict(rows)

    def _next_rows(self) -> tuple[Any, bool]:
        """A batch of the dataloader, and whether it is the first of an epoch."""
        rows = None if self._iterator is None else next(self._iterator, None)
        if rows is not None:
            return rows, False
        for _ in range(2):  # of an epoch that a smaller batch was in the middle of, less than one may be left
            self._iterator = iter(self._dataloader)
            if (rows := next(self._iterator, None)) is not None:
                return rows, True
        raise ValueError("data.sampler: an epoch without a single whole batch. Make it yield more rows.")
