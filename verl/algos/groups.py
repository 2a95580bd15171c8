"""Statistics over groups of rows with the same prompt, vectorised over all groups.

Statistics are [batch]: each row gets the value of its group. They are float64, so that the differences between equal
rewards and their mean are exactly 0. Rows without model tokens (filler rows) are excluded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from verl.algos.masked_ops import apply_mask

Index: TypeAlias = np.ndarray | torch.Tensor | Sequence[Any]


class Groups:
    """The groups of a batch. `index` [batch]: one group id per row (an object array of uids, a list or a tensor)."""

    def __init__(self, index: Index, response_mask: torch.Tensor) -> None:
        ids = index.cpu().numpy() if isinstance(index, torch.Tensor) else np.asarray(index)
        if ids.shape != response_mask.shape[:1]:
            raise ValueError(
                f"index: expected one group id per row ({response_mask.shape[0]} rows), got shape {ids.shape}."
                " Pass e.g. the uid column."
            )
        # As strings, ids of mixed types can be sorted, and faster than as objects.
        _, group_of_row = np.unique(ids.astype(str) if ids.dtype == object else ids, return_inverse=True)
        self.group_of_row = torch.from_numpy(group_of_row.reshape(-1).astype(np.int64)).to(response_mask.device)
        """[batch] int64: the group of each row, from 0 to `num_groups` - 1."""
        self.num_groups = int(group_of_row.max()) + 1 if len(ids) else 0
        self.mask = response_mask.bool()
        """[batch, response]: model tokens."""
        self.non_empty = self.mask.any(dim=-1)
        """[batch]: rows with model tokens; the others are filler rows."""
        self.size = self.sum(torch.ones_like(self.group_of_row, dtype=torch.float64))
        """[batch] float64: number of non-empty rows in each row's group."""

    def scores(self, token_level_rewards: torch.Tensor) -> torch.Tensor:
        """Return the sum of each row's token rewards: [batch, response] → [batch]."""
        return apply_mask(token_level_rewards, self.mask).sum(dim=-1, dtype=torch.float64)

    def to_tokens(self, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """[batch] → [batch, response]: the row's value at its model tokens, 0 elsewhere.

        The dtype is that of `like`, but at least float32.
        """
        return apply_mask(values.to(torch.promote_types(like.dtype, torch.float32))[:, None], self.mask)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` [batch] over each row's group."""
        values = apply_mask(values.double(), self.non_empty)
        totals = torch.zeros(self.num_groups, dtype=torch.float64, device=values.device)
        return totals.index_add_(0, self.group_of_row, values)[self.group_of_row]

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean of `values` [batch] over each row's group; 0 in a group of filler rows."""
        return self.sum(values) / self.size.clamp(min=1.0)

    def centered(self, values: torch.Tensor) -> torch.Tensor:
        """Return the difference from the group's mean; 0 in a group of one, and for filler rows."""
        return torch.where(self.non_empty, values.double() - self.mean(values), 0.0)

    def std(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sample standard deviation (n - 1); 0 in a group of one."""
        return (self.sum(self.centered(values) ** 2) / (self.size - 1).clamp(min=1.0)).sqrt()

    def has_spread(self, values: torch.Tensor, tolerance: float) -> torch.Tensor:
        """Return whether the range of `values` in each row's group exceeds `tolerance`; False for filler rows."""
        return self.non_empty & (self.max(values) + self.max(-values) > tolerance)  # max - min

    def max(self, values: torch.Tensor, among: torch.Tensor | None = None) -> torch.Tensor:
        """Return the maximum of `values` over the rows of the group that are in the mask `among`; -inf if none are."""
        included = self.non_empty if among is None else self.non_empty & among
        values = torch.where(included, values.double(), -torch.inf)
        maxima = torch.full((self.num_groups,), -torch.inf, dtype=torch.float64, device=values.device)
        return maxima.scatter_reduce_(0, self.group_of_row, values, "amax")[self.group_of_row]
