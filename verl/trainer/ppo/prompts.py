"""Dataloaders of a run, and PromptStream: the training prompts over all epochs, any number at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from typing import Any

from torch.utils.data import SequentialSampler

from verl.config import DataConfig, PPOConfig
from verl.config.plan import batch_plan
from verl.protocol import DataProto
from verl.trainer.common.loader import BatchLoader
from verl.trainer.ppo.row_balancing import concat_prompts
from verl.utils.concurrency import JobThread
from verl.utils.dataset.rl_dataset import AbstractCurriculumSampler, EpochSampler
from verl.utils.dataset.rl_dataset import collate_fn as default_collate_fn

logger = logging.getLogger(__name__)

# Seconds to wait at the end of a run for a batch that is still being fetched.
_LAST_FETCH_S = 10.0


def create_dataloaders(
    config: PPOConfig, train: Any, val: Any, collate_fn: Any = None, sampler: Any = None
) -> tuple[BatchLoader, BatchLoader | None]:
    """Return the dataloaders of the training and the validation dataset; None if the latter is missing or empty."""
    data = config.data
    loader = make_dataloader(train, data, collate_fn, sampler)
    if val is None or not len(val):
        return loader, None
    return loader, make_dataloader(val, data, collate_fn, batch_size=data.val_batch_size or len(val))


def schedule_steps(config: PPOConfig, batches_per_epoch: int) -> int:
    """Return the number of training steps of the run; set the length of learning-rate schedules that have none."""
    prompts = batches_per_epoch * config.data.gen_batch_size * config.trainer.total_epochs
    steps = config.trainer.total_training_steps or prompts // config.data.train_batch_size
    plan = batch_plan(config)
    for block, update in ((config.actor_rollout_ref.actor, plan.actor), (config.critic, plan.critic)):
        if update is not None and block.optim.total_training_steps is None:
            block.optim.total_training_steps = steps * update.optimizer_steps
    return steps


def make_dataloader(
    dataset: Any,
    config: DataConfig,
    collate_fn: Callable[..., Any] | None = None,
    sampler: Any = None,
    batch_size: int | None = None,
) -> BatchLoader:
    """Return a dataloader for training: full batches of `gen_batch_size` prompts in the order of the sampler. With
    `batch_size`, return a dataloader for validation: all rows, in the order of the dataset."""
    training = batch_size is None
    size = config.gen_batch_size if batch_size is None else batch_size
    if training and len(dataset) < size:
        key = "data.gen_batch_size" if size != config.train_batch_size else "data.train_batch_size"
        raise ValueError(
            f"{key} = {size}: data.train_files have only {len(dataset)} usable prompts."
            f" Set it to {len(dataset)} or less, or use more data."
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
    """Return a sampler that can resume at any batch; with `data.shuffle` it shuffles every epoch by `data.seed`."""
    return EpochSampler(dataset, config.seed, config.shuffle, batch_size=config.gen_batch_size)


class PromptStream:
    """Draws batches from a dataloader, over all epochs, and returns any number of prompts at a time.

    Its state is the position of the dataloader and the queued prompts, without a prefetched batch. A resumed run
    continues with the prompt that an uninterrupted run would take next.
    """

    def __init__(self, dataloader: Any, total_epochs: int, batch_size: int) -> None:
        """`batch_size`: number of prompts of `next_batch`."""
        self.dataloader, self._batch_size = dataloader, batch_size
        self._total_epochs = total_epochs
        self._iterator: Iterator[Any] | None = None
        self._drawn_batches = 0
        self._queue: DataProto | None = None
        self._prefetches = isinstance(dataloader, BatchLoader) and not dataloader.is_curriculum
        self._loader = JobThread("prompts")
        self.prefetched: Future[tuple[Any, bool]] | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the last drawn batch, counted from 0."""
        return max(0, self._drawn_batches - 1) // self.batches_per_epoch

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches of the dataloader."""
        return max(1, len(self.dataloader))

    @property
    def queued(self) -> int:
        """Number of prompts that were drawn or put back and not returned yet."""
        return 0 if self._queue is None else len(self._queue)

    def next_batch(self) -> DataProto:
        """Return the next `batch_size` prompts."""
        return self.take(self._batch_size)

    def take(self, count: int, prefetch: bool = True) -> DataProto:
        """Return the next `count` prompts, and prefetch the next batch. With `prefetch=False`, the caller has to call
        `prefetch`."""
        while self.queued < count:
            drawn = self._draw()
            self._queue = drawn if self._queue is None else concat_prompts([self._queue, drawn])
        assert self._queue is not None
        taken, remaining = self._queue[:count], self._queue[count:]
        self._queue = remaining if len(remaining) else None
        if prefetch:
            self.prefetch()
        return taken

    def prefetch(self) -> None:
        """Start to load the next batch in a thread, unless one is prefetched or the dataloader does not support it."""
        if self._prefetches and self.prefetched is None:
            self.prefetched = self._loader.submit(self.next_rows)

    def put_back(self, prompts: DataProto) -> None:
        """Return taken prompts to the front of the queue."""
        self._queue = prompts if self._queue is None else concat_prompts([prompts, self._queue])

    def reject(self, prompts: DataProto) -> None:
        """No effect: a taken prompt is not returned again, trained or not."""

    def update_sampler(self, batch: DataProto) -> None:
        """Pass a scored batch to a curriculum sampler."""
        sampler = getattr(self.dataloader, "sampler", None)
        if isinstance(sampler, AbstractCurriculumSampler):
            sampler.update(batch)

    def loader_state(self) -> dict[str, Any]:
        """Return the position of the dataloader, without a prefetched batch. Saved in addition to `state_dict`."""
        fetched = self.prefetched is not None and self.prefetched.exception() is None
        return self.dataloader.state_dict(without_last=True) if fetched else self.dataloader.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return the queued prompts as plain data. The position of the dataloader is in `loader_state`."""
        queue = None
        if self._queue is not None:
            queue = {"tensors": dict(self._queue.batch.items()), "arrays": dict(self._queue.non_tensor_batch)}
        return {"drawn": self._drawn_batches, "waiting": queue}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._iterator, self.prefetched, self._drawn_batches = None, None, int(state["drawn"])
        queue = state["waiting"]
        self._queue = None if queue is None else DataProto.from_dict(queue["tensors"], queue["arrays"])

    def close(self) -> None:
        """Wait for a running prefetch, up to a limit (the dataset may hang), and stop the dataloader's workers."""
        if self.prefetched is not None:
            wait([self.prefetched], timeout=_LAST_FETCH_S)
        self._loader.close()
        self._iterator = None
        if isinstance(self.dataloader, BatchLoader):
            self.dataloader.close()

    def _draw(self) -> DataProto:
        rows, new_epoch = self.next_rows() if self.prefetched is None else self.prefetched.result()
        self.prefetched = None
        if new_epoch:
            epoch = self._drawn_batches // self.batches_per_epoch + 1
            logger.info("Epoch %d/%d", epoch, max(epoch, self._total_epochs))
        self._drawn_batches += 1
        return DataProto.from_single_dict(rows)

    def next_rows(self) -> tuple[Any, bool]:
        """Return the next batch of the dataloader, and whether it is the first of an epoch."""
        rows = None if self._iterator is None else next(self._iterator, None)
        if rows is not None:
            return rows, False
        # After a resume with a larger batch size, the epoch may have less than one batch left: try the next epoch.
        for _ in range(2):
            self._iterator = iter(self.dataloader)
            if (rows := next(self._iterator, None)) is not None:
                return rows, True
        raise ValueError("data.sampler: an epoch has less than one batch. Make the sampler yield more rows.")
