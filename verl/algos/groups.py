"""Statistics over groups of rows with the same prompt, vectorised over all groups.

Statistics are [batch] float64: each row gets the value of its group, precise enough that equal rewards cancel to 0.
Rows without model tokens (filler rows) are excluded.
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
                f"index: {ids.shape} ids for {response_mask.shape[0]} rows. Pass one per row, e.g. the column uid."
            )
        # As strings, ids of mixed types can be sorted, and faster than as objects.
        _, group_of_row = np.unique(ids.astype(str) if ids.dtype == object else ids, return_inverse=True)
        self.of_row = torch.from_numpy(group_of_row.reshape(-1).astype(np.int64)).to(response_mask.device)
        self.count = int(group_of_row.max()) + 1 if len(ids) else 0
        self.mask = response_mask.bool()
        self.non_empty = self.mask.any(dim=-1)
        self.size = self.sum(torch.ones_like(self.of_row, dtype=torch.float64))

    def scores(self, token_level_rewards: torch.Tensor) -> torch.Tensor:
        """Return the sum of each row's token rewards: [batch, response] → [batch]."""
        return apply_mask(token_level_rewards, self.mask).sum(dim=-1, dtype=torch.float64)

    def to_tokens(self, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """[batch] → [batch, response]: the row's value on each of its model tokens; dtype as `like`, min. float32."""
        return apply_mask(values.to(torch.promote_types(like.dtype, torch.float32))[:, None], self.mask)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` [batch] over each row's group."""
        values = apply_mask(values.double(), self.non_empty)
        totals = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        return totals.index_add_(0, self.of_row, values)[self.of_row]

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        return self.sum(values) / self.size.clamp(min=1.0)

    def centered(self, values: torch.Tensor) -> torch.Tensor:
        """Return the difference from the group's mean; 0 in a group of one."""
        return torch.where(self.non_empty, values.double() - self.mean(values), 0.0)

    def std(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sample standard deviation (n - 1); 0 in a group of one."""
        return (self.sum(self.centered(values) ** 2) / (self.size - 1).clamp(min=1.0)).sqrt()

    def differ(self, values: torch.Tensor, tolerance: float) -> torch.Tensor:
        """Whether the range of `values` in each row's group exceeds `tolerance`; False for filler rows."""
        return self.non_empty & (self.max(values) + self.max(-values) > tolerance)

    def max(self, values: torch.Tensor, among: torch.Tensor | None = None) -> torch.Tensor:
        """Return the maximum of `values` over the rows of the group that are in the mask `among`; -inf if none are."""
        included = self.non_empty if among is None else self.non_empty & among
        values = torch.where(included, values.double(), -torch.inf)
        maxima = torch.full((self.count,), -torch.inf, dtype=torch.float64, device=values.device)
        return maxima.scatter_reduce_(0, self.of_row, values, "amax")[self.of_row]
