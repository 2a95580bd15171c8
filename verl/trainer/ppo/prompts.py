"""Prompts epoch after epoch, from a position that can be saved: `PromptLoader` gives whole batches, however many
processes load ahead of it; `PromptStream` any number of prompts, those first that a step took and did not use."""

from __future__ import annotations

import copy
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch.utils.data import DataLoader, SequentialSampler

from verl.config import DataConfig
from verl.protocol import DataProto
from verl.utils.dataset.rl_dataset import collate_fn as default_collate_fn
from verl.utils.dataset.sampler import AbstractCurriculumSampler, EpochSampler

logger = logging.getLogger(__name__)


def make_dataloader(
    dataset: Any,
    config: DataConfig,
    collate_fn: Callable[..., Any] | None = None,
    sampler: Any = None,
    batch_size: int | None = None,
) -> PromptLoader:
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
    return PromptLoader(
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


class PromptLoader:
    """Batches of a dataset in a sampler's order; iterating once is one epoch, or the rest of a restored one.

    The saved position is that of the batches handed out. What worker processes have loaded beyond them is drawn again
    after a restore, so no row is lost or repeated, and the number of workers may change in between. A sampler with
    `state_dict` and `load_state_dict` is restored by them; any other begins anew, and what was handed out is skipped.
    Worker processes start with the first batch and stay: they see the dataset as it is then.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: Any,
        *,
        batch_size: int,
        drop_last: bool,
        num_workers: int,
        collate_fn: Callable[..., Any],
    ) -> None:
        if not hasattr(sampler, "__len__"):
            raise ValueError(
                f"data.sampler.path: {type(sampler).__name__} has no __len__. Let it return the rows of an epoch."
            )
        self.dataset, self.sampler = dataset, sampler
        self._batch_size, self._drop_last = batch_size, drop_last
        self._num_workers = _useful_workers(num_workers, len(self), sampler)
        self.learns = isinstance(sampler, AbstractCurriculumSampler)
        """Whether the next batch depends on what becomes of this one: it must not be fetched early."""
        self._keeps_state = hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")
        self._done = 0  # batches of this epoch handed out
        self._restored = False
        # After each batch that is drawn and not yet handed out: the sampler's state, to be saved once it is.
        self._ahead: deque[Any] = deque()
        self._state: Any = None
        self._before: tuple[int, Any] = (0, None)  # `_done` and `_state` without the batch handed out last
        self._skip = 0
        self._loader = DataLoader(
            dataset,
            batch_sampler=_EachEpoch(self._draw),
            num_workers=self._num_workers,
            collate_fn=collate_fn,
            worker_init_fn=_begin_worker,
            persistent_workers=self._num_workers > 0,
        )

    def __len__(self) -> int:
        rows = len(self.sampler)
        return rows // self._batch_size if self._drop_last else -(-rows // self._batch_size)

    def __iter__(self) -> Iterator[Any]:
        self._ahead.clear()
        self._done = self._done if self._restored else 0
        self._skip = 0 if self._keeps_state else self._done
        self._restored = False
        self._state = self._sampler_state()
        for batch in self._loader:
            self._before = self._done, self._state
            self._state = self._ahead.popleft()
            self._done += 1
            yield batch

    def state_dict(self, without_last: bool = False) -> dict[str, Any]:
        """Where the epoch stands, and what the data was; plain data.

        `without_last`: as if the batch handed out last had not been.
        """
        done, sampler = self._before if without_last else (self._done, self._state)
        if self._keeps_state and not without_last and not self._ahead:
            # With nothing drawn ahead the sampler itself knows best: it may have learned since the last batch.
            sampler = copy.deepcopy(self.sampler.state_dict())
        state: dict[str, Any] = {"batches": done, "of": len(self), "sampler": sampler, "dataset": None}
        if hasattr(self.dataset, "state_dict"):
            state["dataset"] = self.dataset.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; a ValueError where the data is not the same."""
        if state["dataset"] is not None and hasattr(self.dataset, "load_state_dict"):
            self.dataset.load_state_dict(state["dataset"])
        self._ahead.clear()
        self._restored, self._done = True, state["batches"] % max(1, state["of"])
        if self._keeps_state:
            self.sampler.load_state_dict(state["sampler"])
        elif self._done:
            logger.warning(
                "data.sampler: %s has no state_dict and load_state_dict; its order begins anew, %d batches are skipped",
                type(self.sampler).__name__, self._done,
            )  # fmt: skip

    def _draw(self) -> Iterator[list[int]]:
        """Row numbers of one batch after the other; runs in this process, ahead of the workers."""
        rows: list[int] = []
        skip = self._skip
        for row in self.sampler:
            rows.append(int(row))
            if len(rows) == self._batch_size:
                if skip:
                    skip -= 1
                else:
                    self._ahead.append(self._sampler_state())
                    yield rows
                rows = []
        if rows and not self._drop_last:
            self._ahead.append(self._sampler_state())
            yield rows

    def _sampler_state(self) -> Any:
        return copy.deepcopy(self.sampler.state_dict()) if self._keeps_state and not self.learns else None


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
        self._fetches_ahead = isinstance(dataloader, PromptLoader) and not dataloader.learns
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

    def take(self, count: int) -> DataProto:
        """The next `count` prompts."""
        while self.waiting < count:
            drawn = self._draw()
            self._waiting = drawn if self._waiting is None else DataProto.concat([self._waiting, drawn])
        assert self._waiting is not None
        taken, rest = self._waiting[:count], self._waiting[count:]
        self._waiting = rest if len(rest) else None
        if self._fetches_ahead and self._fetched is None:
            self._fetched = self._thread.submit(self._next_rows)
        return taken

    def put_back(self, prompts: DataProto) -> None:
        """Prompts that were taken and are to be handed out again, before all others."""
        self._waiting = prompts if self._waiting is None else DataProto.concat([prompts, self._waiting])

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
        self._iterator = iter(self._dataloader)
        rows = next(self._iterator, None)
        if rows is None:
            raise ValueError("data.sampler: an epoch without a single whole batch. Make it yield more rows.")
        return rows, True


class _EachEpoch:
    """What a DataLoader takes for a batch sampler: an iterator from the method `draw` for every epoch."""

    def __init__(self, draw: Callable[[], Iterator[list[int]]]) -> None:
        # Its owner has the DataLoader: in a circle, worker processes would outlive both until somebody cleans up.
        self._draw = weakref.WeakMethod(draw)

    def __iter__(self) -> Iterator[list[int]]:
        draw = self._draw()
        assert draw is not None
        return draw()


def _useful_workers(wanted: int, batches: int, sampler: Any) -> int:
    """No more processes than cores or batches; none for a sampler that learns, which must not draw ahead."""
    if isinstance(sampler, AbstractCurriculumSampler):
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    useful = min(wanted, cores, batches)
    return useful if batches > 1 else 0


def _begin_worker(worker: int) -> None:
    # A forked tokenizer that used threads before would wait for threads which are not there.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
