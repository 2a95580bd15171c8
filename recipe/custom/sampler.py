"""Samplers: templates for a custom order of prompts. Copy the file, change what you need, and configure a class:

    python3 -m verl.trainer.main_ppo … data.sampler.path=mine.py data.sampler.name=SometimesSolved

`WeightedSources` mixes data sources by weight; `SometimesSolved` prefers prompts that the policy solves sometimes.
Both draw the prompts of a batch without repetition (two groups of one prompt would be merged), so a prompt of large
weight recurs in later batches, and an "epoch" has as many rows as the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from verl.algos.groups import Trajectories
from verl.experimental.dataset.sampler import AbstractCurriculumSampler, AbstractSampler

# Sampling weight of the rows of a source; default 1.
SOURCE_WEIGHTS = {"openai/gsm8k": 1.0, "lighteval/MATH": 3.0}
# The estimated solve rate of a prompt: initial value, and weight of a new observation (exponential moving average).
INITIAL_RATE, UPDATE_WEIGHT = 0.5, 0.5
# Minimum weight of prompts that are always or never solved; the maximum is 0.25.
MIN_WEIGHT = 0.02


class WeightedSources(AbstractSampler):
    """Batches of distinct rows, drawn with probability proportional to the weight of their data source."""

    def __init__(self, data_source: Any, data_config: Any) -> None:
        sources = data_source.column(data_config.reward_fn_key)
        weights = np.array([SOURCE_WEIGHTS.get(source, 1.0) for source in sources])
        self._draw = WeightedBatches(len(data_source), data_config)
        self._weights = weights

    def __len__(self) -> int:
        return len(self._draw)

    def __iter__(self) -> Iterator[int]:
        return self._draw.epoch(lambda: self._weights)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self._draw.batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._draw.batches = state["batches"]


class SometimesSolved(AbstractCurriculumSampler):
    """Prefers prompts whose responses differ: the weight of a prompt with solve rate p is p (1 - p).

    Groups that are all correct or all wrong have no advantage. Scores must be between 0 and 1. The weights change after
    every generated batch, so no batch is drawn in advance: `data.dataloader_num_workers` is treated as 0.
    """

    def __init__(self, data_source: Any, data_config: Any) -> None:
        self._row_of = {uid: row for row, uid in enumerate(data_source.uids())}
        self._solved = np.full(len(data_source), INITIAL_RATE)
        self._draw = WeightedBatches(len(data_source), data_config)

    def __len__(self) -> int:
        return len(self._draw)

    def __iter__(self) -> Iterator[int]:
        return self._draw.epoch(lambda: self._solved * (1 - self._solved) + MIN_WEIGHT)

    def update(self, batch: Any) -> None:
        trajectories = Trajectories.of(batch)  # a trajectory may have several rows and its score in one of them
        scores = trajectories.sum(batch.batch["token_level_scores"].sum(-1)).clamp(0, 1).numpy()
        uids = np.asarray(batch.non_tensor_batch["uid"])[trajectories.last_rows]
        for uid in dict.fromkeys(uids):
            row = self._row_of.get(uid)
            if row is not None:
                self._solved[row] += UPDATE_WEIGHT * (scores[uids == uid].mean() - self._solved[row])

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self._draw.batches, "solved": self._solved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._draw.batches, self._solved = state["batches"], np.array(state["solved"])


class WeightedBatches:
    """Draws batches of distinct rows by weight; batch k depends only on seed, k and weights, so it can be resumed."""

    def __init__(self, rows: int, data_config: Any) -> None:
        self.batches = 0  # drawn so far, over all epochs
        self._rows, self._size, self._seed = rows, data_config.gen_batch_size, data_config.seed

    def __len__(self) -> int:
        return self._rows // self._size * self._size

    def epoch(self, weights: Any) -> Iterator[int]:
        """The remaining rows of the current epoch; `weights()` is called before every batch."""
        for _ in range(self.batches % (len(self) // self._size), len(self) // self._size):
            noise = np.random.default_rng([self._seed, self.batches]).gumbel(size=self._rows)
            # The top k of log-weight plus Gumbel noise are a sample without replacement (arXiv 1903.06059).
            best = np.argsort(-(np.log(weights()) + noise))[: self._size]
            self.batches += 1
            yield from best.tolist()
