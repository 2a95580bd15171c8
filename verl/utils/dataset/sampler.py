"""The order of prompts: the default sampler, which resumes exactly, and base classes for users' (`data.sampler`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Sampler


class AbstractSampler(Sampler[int], ABC):
    """Base of the class in `data.sampler.{path,name}`: iterates over row numbers of `data_source`.

    With `state_dict` and `load_state_dict` its position is saved and restored with the run.
    """

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: Any) -> None: ...


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that adapts to responses: `update` gets every trained batch, with scores and advantages.

    With `algorithm.filter_groups` it gets every generated batch instead, with scores and before advantages are
    computed: groups that are dropped because all scores are equal are informative for the sampler too.
    """

    @abstractmethod
    def update(self, batch: Any) -> None: ...


class EpochSampler(Sampler[int]):
    """Every row once per epoch, in an order that depends on (seed, epoch) only; or in file order.

    An epoch has only full batches of `batch_size` rows. In file order, the next epoch starts with the rows at the end
    that did not fill a batch and wraps around; shuffled, an epoch leaves out random rows. Iterating once is one epoch;
    after `load_state_dict` the interrupted epoch continues with its next row.
    """

    def __init__(self, data_source: Sized, seed: int, shuffle: bool = True, batch_size: int = 1) -> None:
        self._rows = len(data_source)
        self._seed = seed
        self._shuffle = shuffle
        self._length = self._rows // batch_size * batch_size
        self._epoch = 0
        self._done = 0
        self._first = 0  # in file order: the first row of the epoch
        self._resumed = True  # the next iteration continues this epoch

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        if not self._resumed or self._done >= self._length:
            self._epoch, self._done = self._epoch + 1, 0
            self._first = (self._first + self._length) % self._rows
        self._resumed = False
        for row in self._order()[self._done : self._length]:
            self._done += 1
            yield row

    def state_dict(self) -> dict[str, int]:
        position = {"epoch": self._epoch, "first": self._first, "done": self._done}
        return {**position, "seed": self._seed, "rows": self._rows}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        if (state["seed"], state["rows"]) != (self._seed, self._rows):
            raise ValueError(
                f"data.seed: the checkpoint was made with seed {state['seed']} and {state['rows']} rows, this run has "
                f"seed {self._seed} and {self._rows}. Restore them, or start from scratch in another folder."
            )
        self._epoch, self._done, self._resumed = state["epoch"], state["done"], True
        self._first = state.get("first", 0)

    def _order(self) -> list[int]:
        if not self._shuffle:
            return [*range(self._first, self._rows), *range(self._first)]
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        return torch.randperm(self._rows, generator=generator).tolist()
