"""Convert between rows and trajectories: rows of a trajectory are concatenated, and results are split again.

A trajectory of an agent that rewrites its context has several rows. If every trajectory has one row, all conversions
return their input.
"""

from __future__ import annotations

import numpy as np
import torch

from verl.algos.groups import Index
from verl.protocol import DataProto


class Trajectories:
    """The trajectories of a batch. `ids`: one per row (None: every row is a trajectory); `response_mask`: [rows,
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
