"""Placement of rows with a common prompt on ranks: groups stay together where that lowers the cost of the busiest rank.

The controller does not have the tokens of a batch, so it estimates what rows share from their groups and lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl.config.engine import PREFIX_MIN_SAVING
from verl.utils.balancing import SequenceCost, get_seqlen_balanced_partitions


@dataclass(frozen=True)
class SharedCosts:
    """Costs of rows of which those of a group share a prefix if they are on one rank."""

    costs: np.ndarray
    """[rows]: cost of a row alone."""
    saved: np.ndarray
    """[rows]: cost of what it shares with the other rows of its group."""
    groups: np.ndarray
    """[rows]: number of its group."""

    @staticmethod
    def estimate(
        costs: np.ndarray, cost: SequenceCost, prompts: np.ndarray, uids: np.ndarray, trajectories: np.ndarray
    ) -> SharedCosts:
        """Rows of a prompt share its shortest prompt; a later row of a trajectory shares the prompt of the row before.

        `prompts` [rows]: prompt tokens; `uids`, `trajectories` [rows]: prompt and trajectory of each row.
        """
        _, groups = np.unique(np.asarray(uids).astype(str), return_inverse=True)
        groups = groups.reshape(-1)
        shortest = np.full(groups.max(initial=-1) + 1, np.iinfo(np.int64).max)
        np.minimum.at(shortest, groups, prompts)
        shared = shortest[groups]
        order = np.argsort(trajectories, kind="stable")
        follows = np.flatnonzero(trajectories[order][1:] == trajectories[order][:-1])
        before, after = order[follows], order[follows + 1]
        shared[after] = np.maximum(shared[after], np.minimum(prompts[before], prompts[after]))
        return SharedCosts(costs, cost(shared), groups)

    def select(self, rows: np.ndarray, fillers: int = 0) -> SharedCosts:
        """Return these rows; the last `fillers` are copies of other rows and cost nothing beside them."""
        saved = self.saved[rows].copy()
        if fillers:
            saved[-fillers:] = self.costs[rows[-fillers:]]
        return SharedCosts(self.costs[rows], saved, self.groups[rows])

    @property
    def worthwhile(self) -> bool:
        """Whether keeping groups together saves enough."""
        return self.total(np.arange(len(self.costs))) <= (1 - PREFIX_MIN_SAVING) * self.costs.sum()

    def total(self, rows: np.ndarray) -> float:
        """Return the cost of these rows on one rank: every group computes its shared part once."""
        groups, first = np.unique(self.groups[rows], return_inverse=True)
        once = np.full(len(groups), np.inf)
        np.minimum.at(once, first.reshape(-1), self.saved[rows])
        return float((self.costs[rows] - self.saved[rows]).sum() + once.sum())


def place_groups(shared: SharedCosts, ranks: int) -> list[list[int]]:
    """Distribute the rows over the ranks in equal numbers, with the lowest cost of the busiest rank.

    Compares two placements: rows balanced one by one, and groups placed whole, costliest first, on the cheapest rank
    with enough space; a group that fits nowhere is split.
    """
    by_row = get_seqlen_balanced_partitions(shared.costs.tolist(), ranks, equal_size=True)
    by_group = _place_whole_groups(shared, ranks)

    def busiest(parts: list[list[int]]) -> float:
        return max(shared.total(np.array(part)) for part in parts)

    return min((by_group, by_row), key=busiest)


def _place_whole_groups(shared: SharedCosts, ranks: int) -> list[list[int]]:
    size = len(shared.costs) // ranks
    order = np.argsort(shared.groups, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(shared.groups[order])) + 1)
    parts: list[list[int]] = [[] for _ in range(ranks)]
    costs = [0.0] * ranks
    for rows in sorted(groups, key=lambda rows: (-shared.total(rows), rows[0])):
        left = rows
        while len(left):
            free = [rank for rank in range(ranks) if len(parts[rank]) < size]
            roomy = [rank for rank in free if size - len(parts[rank]) >= len(left)]
            # If it fits nowhere: on the rank with the most space, so that it is split least.
            rank = min(roomy, key=costs.__getitem__) if roomy else min(free, key=lambda rank: len(parts[rank]))
            here, left = np.split(left, [min(len(left), size - len(parts[rank]))])
            parts[rank] += here.tolist()
            costs[rank] += shared.total(here)
    return [sorted(part) for part in parts]
