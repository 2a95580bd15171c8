"""Which groups of a step are recorded, and which steps are deleted first when the recording is too large. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["groups_within", "step_to_drop"]


def groups_within(sizes: Sequence[int], budget: int, seed: int) -> list[int]:
    """Return the indices of the groups to record, in ascending order: all if they fit into `budget` bytes, else a
    uniform sample.

    The groups are put in a random order, and recorded up to the first one that does not fit. `sizes`: bytes of each.
    """
    if sum(sizes) <= budget:
        return list(range(len(sizes)))
    order = np.random.default_rng(seed).permutation(len(sizes))
    fitting = int(np.searchsorted(np.cumsum(np.asarray(sizes)[order]), budget, side="right"))
    return sorted(order[:fitting].tolist())


def step_to_drop(steps: Sequence[int]) -> int | None:
    """Return the recorded step whose removal leaves the smallest gap, so that the remaining ones stay evenly spaced;
    of equal gaps the earliest. Never the first or the last step. None if there is no other.

    `steps`: in ascending order.
    """
    gaps = [(steps[i + 1] - steps[i - 1], steps[i]) for i in range(1, len(steps) - 1)]
    return min(gaps)[1] if gaps else None
