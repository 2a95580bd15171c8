"""BatchLoader: a dataloader whose position can be saved and restored exactly, despite prefetching."""

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

from verl.utils.dataset.rl_dataset import AbstractCurriculumSampler
from verl.utils.resources import available_cores

logger = logging.getLogger(__name__)


class BatchLoader:
    """Batches of a dataset in a sampler's order; one iteration is one epoch, or the remainder of a restored epoch.

    The saved position counts returned batches only. Prefetched batches are drawn again after a restore, so no row is
    lost or repeated, and the number of workers may change. Without worker processes, a thread loads the next batch
    while one is used, if the dataset has `read_in_thread` (tokenizers release the GIL). A sampler is restored by its
    `load_state_dict`; a sampler without state restarts, and the returned batches are skipped. Worker processes start
    with the first batch and persist: later changes of the dataset do not reach them.
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
                f"data.sampler.path: {type(sampler).__name__} has no __len__. Return the number of rows of an epoch."
            )
        self.dataset, self.sampler = dataset, sampler
        self._batch_size, self._drop_last = batch_size, drop_last
        self.num_workers = _useful_workers(num_workers, len(self), sampler)
        self.is_curriculum = isinstance(sampler, AbstractCurriculumSampler)
        """Whether the next batch depends on the result of this one: it must not be prefetched."""
        # A user's dataset may use objects bound to a thread, or a shared random generator: it has to opt in.
        needs_main_thread = self.num_workers or self.is_curriculum or hasattr(dataset, "state_dict")
        self._prefetches = not needs_main_thread and getattr(dataset, "read_in_thread", False)
        self._sampler_has_state = hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")
        self._done = 0  # number of batches of this epoch that were returned
        self._restored = False
        # The sampler's state after each prefetched batch. It becomes `_state` when the batch is returned.
        self._prefetched_states: deque[Any] = deque()
        self._state: Any = None
        self._before: tuple[int, Any] = (0, None)  # `_done` and `_state` before the last batch
        self._skip = 0
        self._next_batch: Future[Any] | None = None
        self._collate_fn = collate_fn
        self._loader = self._new_loader()

    def _new_loader(self) -> DataLoader:
        return DataLoader(
            self.dataset,
            batch_sampler=_EpochBatches(self._draw),
            num_workers=self.num_workers,
            collate_fn=self._collate_fn,
            worker_init_fn=_init_worker,
            persistent_workers=self.num_workers > 0,
        )

    def close(self) -> None:
        """End the worker processes; a later iteration starts new ones. No iterator of this loader may be in use.

        Without this call, the process receives a SIGCHLD per worker at exit, for which torch prints a traceback.
        """
        self._loader = self._new_loader()  # a DataLoader ends its workers when it is deleted

    def __len__(self) -> int:
        rows = len(self.sampler)
        return rows // self._batch_size if self._drop_last else -(-rows // self._batch_size)

    def __iter__(self) -> Iterator[Any]:
        self._prefetched_states.clear()
        self._done = self._done if self._restored else 0
        self._skip = 0 if self._sampler_has_state else self._done
        self._restored = False
        self._state = self._sampler_state()
        for batch in self._prefetch() if self._prefetches else self._loader:
            self._before = self._done, self._state
            self._state = self._prefetched_states.popleft()
            self._done += 1
            yield batch

    def state_dict(self, without_last: bool = False) -> dict[str, Any]:
        """Return the position in the epoch and the state of the dataset, as plain data.

        `without_last`: as if the last batch had not been returned.
        """
        if self._next_batch is not None:
            wait([self._next_batch])  # while rows are drawn, the position of the sampler is undefined
        done, sampler = self._before if without_last else (self._done, self._state)
        if self._sampler_has_state and not without_last and not self._prefetched_states:
            # Nothing is prefetched: use the sampler's current state, which results of the last batch may have changed.
            sampler = copy.deepcopy(self.sampler.state_dict())
        state: dict[str, Any] = {"batches": done, "of": len(self), "sampler": sampler, "dataset": None}
        if hasattr(self.dataset, "state_dict"):
            state["dataset"] = self.dataset.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position. Raises ValueError if `state` was saved by an incompatible version."""
        if "batches" not in state:
            raise ValueError(
                "trainer.resume_mode: the checkpoint's position in the data was saved by another version of verl. Start"
                " anew in another folder (trainer.default_local_dir), from the model in the checkpoint."
            )
        if state["dataset"] is not None and hasattr(self.dataset, "load_state_dict"):
            self.dataset.load_state_dict(state["dataset"])
        self._prefetched_states.clear()
        self._restored, self._done = True, state["batches"] % max(1, state["of"])
        if self._sampler_has_state:
            self.sampler.load_state_dict(state["sampler"])
        elif self._done:
            logger.warning(
                "data.sampler: %s has no state_dict and load_state_dict; its order restarts, %d batches are skipped",
                type(self.sampler).__name__, self._done,
            )  # fmt: skip

    def _draw(self) -> Iterator[list[int]]:
        """Yield the row numbers of each batch. Called in this process, before workers load the batch."""
        rows: list[int] = []
        skip = self._skip
        for row in self.sampler:
            rows.append(int(row))
            if len(rows) == self._batch_size:
                if skip:
                    skip -= 1
                else:
                    self._prefetched_states.append(self._sampler_state())
                    yield rows
                rows = []
        if rows and not self._drop_last:
            self._prefetched_states.append(self._sampler_state())
            yield rows

    def _prefetch(self) -> Iterator[Any]:
        """Yield batches; while one is used, a thread loads the next."""
        source, end = iter(self._loader), object()
        with ThreadPoolExecutor(1, "next-batch") as thread:
            self._next_batch = thread.submit(next, source, end)
            while (batch := self._next_batch.result()) is not end:
                self._next_batch = thread.submit(next, source, end)
                yield batch

    def _sampler_state(self) -> Any:
        return copy.deepcopy(self.sampler.state_dict()) if self._sampler_has_state and not self.is_curriculum else None


class _EpochBatches:
    """A batch sampler for a DataLoader: calls the method `draw` for every epoch."""

    def __init__(self, draw: Callable[[], Iterator[list[int]]]) -> None:
        # Weak: in a reference cycle with the DataLoader, worker processes would live until the garbage collector runs.
        self._draw = weakref.WeakMethod(draw)

    def __iter__(self) -> Iterator[list[int]]:
        draw = self._draw()
        assert draw is not None
        return draw()


def _useful_workers(requested: int, batches: int, sampler: Any) -> int:
    """Return the number of workers: at most one per core and per batch; 0 for a single batch, and for a curriculum
    sampler, which must not prefetch."""
    if isinstance(sampler, AbstractCurriculumSampler):
        return 0
    useful = min(requested, available_cores(), batches)
    return useful if batches > 1 else 0


def _init_worker(worker: int) -> None:
    # A tokenizer that used threads before the fork would wait for threads that do not exist in the child.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
