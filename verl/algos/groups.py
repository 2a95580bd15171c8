"""Rows that answer the same prompt, compared with each other: one operation over all groups at a time.

Statistics are [batch] float64: each row gets its group's number, precise enough that equal rewards cancel to 0. Rows
without any model token (filler) belong to no group and count for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from verl.algos.returns import keep

Index: TypeAlias = np.ndarray | torch.Tensor | Sequence[Any]


class Groups:
    """Built from one id per row, [batch] (an object array of uids, a list or a tensor)."""

    def __init__(self, index: Index, response_mask: torch.Tensor) -> None:
        ids = index.cpu().numpy() if isinstance(index, torch.Tensor) else np.asarray(index)
        if ids.shape != response_mask.shape[:1]:
            raise ValueError(
                f"index: {ids.shape} ids for {response_mask.shape[0]} rows. Pass one per row, such as the column uid."
            )
        # As text: ids of any mixture of types can be sorted, and faster than as objects.
        _, group_of_row = np.unique(ids.astype(str) if ids.dtype == object else ids, return_inverse=True)
        self.of_row = torch.from_numpy(group_of_row.reshape(-1).astype(np.int64)).to(response_mask.device)
        self.count = int(group_of_row.max()) + 1 if len(ids) else 0
        self.mask = response_mask.bool()
        self.real = self.mask.any(dim=-1)
        self.size = self.sum(torch.ones_like(self.of_row, dtype=torch.float64))

    def scores(self, token_level_rewards: torch.Tensor) -> torch.Tensor:
        """What each response earned in all: [batch, response] → [batch]."""
        return keep(token_level_rewards, self.mask).sum(dim=-1, dtype=torch.float64)

    def spread(self, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """[batch] → [batch, response]: the row's value on each of its model tokens; dtype as `like`, min. float32."""
        return keep(values.to(torch.promote_types(like.dtype, torch.float32))[:, None], self.mask)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of `values` [batch] over the row's group."""
        values = keep(values.double(), self.real)
        totals = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        return totals.index_add_(0, self.of_row, values)[self.of_row]

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        return self.sum(values) / self.size.clamp(min=1.0)

    def centred(self, values: torch.Tensor) -> torch.Tensor:
        """Distance from the group's mean; 0 in a group of one, which has nothing to be compared with."""
        return torch.where(self.real, values.double() - self.mean(values), 0.0)

    def std(self, values: torch.Tensor) -> torch.Tensor:
        """Standard deviation of the sample (n - 1); 0 in a group of one."""
        return (self.sum(self.centred(values) ** 2) / (self.size - 1).clamp(min=1.0)).sqrt()

    def differ(self, values: torch.Tensor, tolerance: float) -> torch.Tensor:
        """Whether `values` in the row's group are further apart than `tolerance`; False for filler rows."""
        return self.real & (self.max(values) + self.max(-values) > tolerance)

    def max(self, values: torch.Tensor, among: torch.Tensor | None = None) -> torch.Tensor:
        """Largest of `values` in the row's group, of those in the boolean mask `among`; -inf where there is none."""
        counted = self.real if among is None else self.real & among
        values = torch.where(counted, values.double(), -torch.inf)
        tops = torch.full((self.count,), -torch.inf, dtype=torch.float64, device=values.device)
        return tops.scatter_reduce_(0, self.of_row, values, "amax")[self.of_row]
