"""Groups of rows: `Groups`, rows with the same prompt; `Trajectories`, rows of one trajectory.

Statistics are computed for all groups at once and have the shape [batch]: each row gets the value of its group. They
are float64, so that the mean of equal float32 rewards is exact and their differences from it are 0. Rows without model
tokens (filler rows) are excluded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from verl.algos.masked_ops import apply_mask
from verl.protocol import DataProto

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
        # Objects are converted to strings: sorting is faster, and ids may have mixed types.
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


class Trajectories:
    """Converts between rows and trajectories: rows of a trajectory are concatenated, and results are split again.

    A trajectory of an agent that rewrites its context has several rows. If every trajectory has one row, all
    conversions return their input. `ids`: one per row (None: every row is a trajectory); `response_mask`: [rows,
    response]. The rows of a trajectory are in order.

    Trajectories are numbered in the order of their first rows. `of_row` [rows]: trajectory number of each row;
    `first_rows` [trajectories]: first row of each; `last_rows` [trajectories]: the row with its last model token (its
    last row, if it has no model token), which holds the values of the trajectory's end.
    """

    def __init__(self, ids: Index | None, response_mask: torch.Tensor) -> None:
        rows = len(response_mask)
        if ids is not None and len(ids) != rows:
            raise ValueError(f"trajectory: {len(ids)} ids for {rows} rows. Pass one per row.")
        self._row_mask = response_mask
        self.of_row = self.first_rows = self.last_rows = np.arange(rows)
        if ids is not None and rows:
            _, first, sorted_number = np.unique(np.asarray(ids).astype(str), return_index=True, return_inverse=True)
            if len(first) < rows:
                self.of_row = np.argsort(np.argsort(first))[sorted_number.reshape(-1)]
                self.first_rows, last = np.sort(first), np.zeros_like(first)
                sampled = response_mask.bool().any(dim=-1).cpu().numpy()
                np.maximum.at(last, self.of_row, np.arange(rows) + rows * sampled)
                self.last_rows = last % rows
        self.one_row_each = len(self.last_rows) == rows
        if not self.one_row_each:
            self._index_tokens()

    @classmethod
    def of(cls, data: DataProto) -> Trajectories:
        """Rows with the same id in the column `trajectory` form one; without this column each row is a trajectory."""
        ids = data.non_tensor_batch["trajectory"] if "trajectory" in data.non_tensor_batch else None
        if "response_mask" in data.batch.keys():
            return cls(ids, data.batch["response_mask"])
        return cls(ids, data.batch["attention_mask"][:, -data.batch["responses"].shape[1] :])

    def __len__(self) -> int:
        return len(self.last_rows)

    @property
    def mask(self) -> torch.Tensor:
        """The concatenated masks of the rows: [trajectories, width]."""
        return self.join(self._row_mask)

    def tokens(self) -> torch.Tensor:
        """Return the column `trajectory_tokens` [rows]: number of model tokens of each row's whole trajectory."""
        return self.to_rows(self.sum(self._row_mask.bool().sum(dim=-1)))

    def join(self, values: torch.Tensor) -> torch.Tensor:
        """Concatenate rows up to their last model tokens: [rows, response] → [trajectories, width], padded with 0."""
        if self.one_row_each:
            return values
        joined = values.new_zeros(self._shape[0] * self._shape[1])
        joined[self._joined_index] = values[self._kept]
        return joined.view(self._shape)

    def split(self, values: torch.Tensor) -> torch.Tensor:
        """Inverse of `join`: [trajectories, width] → [rows, response], 0 after each row's last model token."""
        if self.one_row_each:
            return values
        rows = values.new_zeros(self._kept.shape)
        rows[self._kept] = values.reshape(-1)[self._joined_index]
        return rows

    def to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Repeat the value of each trajectory for its rows: [trajectories, …] → [rows, …]."""
        return values if self.one_row_each else values[torch.from_numpy(self.of_row).to(values.device)]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the rows of each trajectory: [rows] → [trajectories]."""
        if self.one_row_each:
            return values
        number = torch.from_numpy(self.of_row).to(values.device)
        return values.new_zeros(len(self)).index_add_(0, number, values)

    def at_last_row(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of `last_rows`: [rows, …] → [trajectories, …]."""
        return values if self.one_row_each else values[torch.from_numpy(self.last_rows).to(values.device)]

    def _index_tokens(self) -> None:
        """Compute which tokens of the rows `join` keeps [rows, response], and their flat indices in its result."""
        mask = self._row_mask.bool()
        column = torch.arange(mask.shape[1], device=mask.device)
        lengths = torch.where(mask, column + 1, 0).amax(dim=-1)
        number = torch.from_numpy(self.of_row).to(mask.device)
        totals = lengths.new_zeros(len(self)).index_add_(0, number, lengths)
        in_order = torch.argsort(number, stable=True)
        ends = lengths[in_order].cumsum(0) - (totals.cumsum(0) - totals)[number[in_order]]
        starts = torch.empty_like(lengths)
        starts[in_order] = ends - lengths[in_order]
        self._shape = (len(self), max(1, int(totals.max())))  # at least one column if all is masked
        self._kept = column < lengths[:, None]
        self._joined_index = ((number * self._shape[1] + starts)[:, None] + column)[self._kept]
