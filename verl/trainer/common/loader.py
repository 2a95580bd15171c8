"""Batches of rows whose position can be saved and restored, however many processes load ahead of it."""

from __future__ import annotations

import copy
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from torch.utils.data import DataLoader

from verl.utils.dataset.sampler import AbstractCurriculumSampler
from verl.utils.resources import available_cores

logger = logging.getLogger(__name__)


class BatchLoader:
    """Batches of a dataset in a sampler's order; iterating once is one epoch, or the rest of a restored one.

    The saved position is that of the batches handed out. What was loaded beyond them is drawn again after a restore, so
    no row is lost or repeated, and the number of workers may change in between. Without worker processes a thread loads
    the next batch while one is used, where the dataset has `read_in_thread`: tokenizers let others run. A sampler with
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
        # One of the user's may hold what only its own thread may use, or draw numbers that others draw too.
        own_place = self._num_workers or self.learns or hasattr(dataset, "state_dict")
        self._by_thread = not own_place and getattr(dataset, "read_in_thread", False)
        self._keeps_state = hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")
        self._done = 0  # batches of this epoch handed out
        self._restored = False
        # After each batch that is drawn and not yet handed out: the sampler's state, to be saved once it is.
        self._ahead: deque[Any] = deque()
        self._state: Any = None
        self._before: tuple[int, Any] = (0, None)  # `_done` and `_state` without the batch handed out last
        self._skip = 0
        self._coming: Future[Any] | None = None
        self._collate_fn = collate_fn
        self._loader = self._new_loader()

    def _new_loader(self) -> DataLoader:
        return DataLoader(
            self.dataset,
            batch_sampler=_EachEpoch(self._draw),
            num_workers=self._num_workers,
            collate_fn=self._collate_fn,
            worker_init_fn=_begin_worker,
            persistent_workers=self._num_workers > 0,
        )

    def close(self) -> None:
        """End the worker processes; no iterator of this loader may be in use. A later iteration starts new ones.

        Otherwise the process gets a SIGCHLD per worker at exit, and torch prints a traceback for it.
        """
        self._loader = self._new_loader()  # a DataLoader ends its workers when it is deleted

    def __len__(self) -> int:
        rows = len(self.sampler)
        return rows // self._batch_size if self._drop_last else -(-rows // self._batch_size)

    def __iter__(self) -> Iterator[Any]:
        self._ahead.clear()
        self._done = self._done if self._restored else 0
        self._skip = 0 if self._keeps_state else self._done
        self._restored = False
        self._state = self._sampler_state()
        for batch in self._one_ahead() if self._by_thread else self._loader:
            self._before = self._done, self._state
            self._state = self._ahead.popleft()
            self._done += 1
            yield batch

    def state_dict(self, without_last: bool = False) -> dict[str, Any]:
        """Where the epoch stands, and what the data was; plain data.

        `without_last`: as if the batch handed out last had not been.
        """
        if self._coming is not None:
            wait([self._coming])  # in the middle of a draw nobody knows where the sampler stands
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
        if "batches" not in state:
            raise ValueError(
                "trainer.resume_mode: the checkpoint's place in the data was saved by another version of verl. Begin"
                " anew in another folder (trainer.default_local_dir), from the model in the checkpoint."
            )
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

    def _one_ahead(self) -> Iterator[Any]:
        """Batches; while one is used, a thread makes the next."""
        source, end = iter(self._loader), object()
        with ThreadPoolExecutor(1, "next-batch") as thread:
            self._coming = thread.submit(next, source, end)
            while (batch := self._coming.result()) is not end:
                self._coming = thread.submit(next, source, end)
                yield batch

    def _sampler_state(self) -> Any:
        return copy.deepcopy(self.sampler.state_dict()) if self._keeps_state and not self.learns else None


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
    useful = min(wanted, available_cores(), batches)
    return useful if batches > 1 else 0


def _begin_worker(worker: int) -> None:
    # A forked tokenizer that used threads before would wait for threads which are not there.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
