"""Samplers: templates for an order of prompts of your own. Copy the file, change what you need, and name a class:

    python3 -m verl.trainer.main_ppo … data.sampler.path=mine.py data.sampler.name=SometimesSolved

`WeightedSources` mixes data sources by weight; `SometimesSolved` prefers prompts that the policy solves now and then.
Both draw the prompts of a batch without repetition (two groups of one prompt would be one), so a prompt of large weight
comes back in later batches, and an "epoch" is as many rows as the data has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from verl.algos.trajectories import Trajectories
from verl.experimental.dataset.sampler import AbstractCurriculumSampler, AbstractSampler

# How often a source is drawn, compared with its share of the rows; others have weight 1.
SOURCE_WEIGHTS = {"openai/gsm8k": 1.0, "lighteval/MATH": 3.0}
# The estimate of how often a prompt is solved: its first value, and how much of it a new batch replaces.
UNKNOWN, RENEWED = 0.5, 0.5
# No prompt is given up: one that is always or never solved still has this chance, beside 0.25 at most.
LEAST_CHANCE = 0.02


class WeightedSources(AbstractSampler):
    """Batches of distinct rows, each drawn with a chance in proportion to the weight of its data source."""

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
    """Prefers prompts whose answers differ: with a share p of right answers, the chance is p (1 - p).

    All right or all wrong teaches a group estimator nothing. Scores are taken to lie between 0 and 1. It learns from
    every batch that was answered, so nothing is drawn ahead: `data.dataloader_num_workers` counts as 0.
    """

    def __init__(self, data_source: Any, data_config: Any) -> None:
        self._row_of = {uid: row for row, uid in enumerate(data_source.uids())}
        self._solved = np.full(len(data_source), UNKNOWN)
        self._draw = WeightedBatches(len(data_source), data_config)

    def __len__(self) -> int:
        return len(self._draw)

    def __iter__(self) -> Iterator[int]:
        return self._draw.epoch(lambda: self._solved * (1 - self._solved) + LEAST_CHANCE)

    def update(self, batch: Any) -> None:
        whole = Trajectories.of(batch)  # an answer may have several rows, and the score on one of them
        scores = whole.sum(batch.batch["token_level_scores"].sum(-1)).clamp(0, 1).numpy()
        uids = np.asarray(batch.non_tensor_batch["uid"])[whole.last_rows]
        for uid in dict.fromkeys(uids):
            row = self._row_of.get(uid)
            if row is not None:
                self._solved[row] += RENEWED * (scores[uids == uid].mean() - self._solved[row])

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self._draw.batches, "solved": self._solved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._draw.batches, self._solved = state["batches"], np.array(state["solved"])


class WeightedBatches:
    """Draws batches of distinct rows by weight; batch k depends on the seed, k and the weights only, so it resumes."""

    def __init__(self, rows: int, data_config: Any) -> None:
        self.batches = 0  # drawn so far, over all epochs
        self._rows, self._size, self._seed = rows, data_config.gen_batch_size, data_config.seed

    def __len__(self) -> int:
        return self._rows // self._size * self._size

    def epoch(self, weights: Any) -> Iterator[int]:
        """The rows of an epoch, or of what is left of it; `weights()` is asked for before every batch."""
        for _ in range(self.batches % (len(self) // self._size), len(self) // self._size):
            noise = np.random.default_rng([self._seed, self.batches]).gumbel(size=self._rows)
            # The largest of log-weight plus Gumbel noise are a draw without repetition (arXiv 1903.06059).
            best = np.argsort(-(np.log(weights()) + noise))[: self._size]
            self.batches += 1
            yield from best.tolist()
