"""Rows that are parts of one trajectory: joined end to end for whatever looks at whole answers, then split again.

An agent that rewrites its context gives several rows per trajectory. Where every trajectory has one row, joining and
splitting return what they were given.
"""

from __future__ import annotations

import numpy as np
import torch

from verl.algos.groups import Index
from verl.protocol import DataProto


class Trajectories:
    """Built from one id per row (None: every row is a trajectory) and the rows' `response_mask` [rows, response].

    The rows of one stand in order; trajectories are numbered as their first rows stand in the batch. `of_row` [rows] is
    the number of each row's. `first_rows` [trajectories] are where each begins, `last_rows` where its last model token
    is: what is said of its end is said there. One without a model token ends with its last row.
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
            self._place_tokens()

    @classmethod
    def of(cls, data: DataProto) -> Trajectories:
        """Rows of one name in the column `trajectory` are one's; without that column each row is a trajectory."""
        ids = data.non_tensor_batch["trajectory"] if "trajectory" in data.non_tensor_batch else None
        if "response_mask" in data.batch.keys():
            return cls(ids, data.batch["response_mask"])
        return cls(ids, data.batch["attention_mask"][:, -data.batch["responses"].shape[1] :])

    def __len__(self) -> int:
        return len(self.last_rows)

    @property
    def mask(self) -> torch.Tensor:
        """The rows' mask, joined: [trajectories, width]."""
        return self.join(self._row_mask)

    def tokens(self) -> torch.Tensor:
        """`trajectory_tokens` [rows]: model tokens of each row's whole trajectory."""
        return self.spread(self.sum(self._row_mask.bool().sum(dim=-1)))

    def join(self, values: torch.Tensor) -> torch.Tensor:
        """[rows, response] → [trajectories, width]: each row up to its last model token, 0 behind the last row's."""
        if self.one_row_each:
            return values
        whole = values.new_zeros(self._shape[0] * self._shape[1])
        whole[self._places] = values[self._kept]
        return whole.view(self._shape)

    def split(self, values: torch.Tensor) -> torch.Tensor:
        """[trajectories, width] → [rows, response], 0 behind each row's last model token."""
        if self.one_row_each:
            return values
        rows = values.new_zeros(self._kept.shape)
        rows[self._kept] = values.reshape(-1)[self._places]
        return rows

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """[trajectories, …] → [rows, …]."""
        return values if self.one_row_each else values[torch.from_numpy(self.of_row).to(values.device)]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """[rows] → [trajectories]."""
        if self.one_row_each:
            return values
        number = torch.from_numpy(self.of_row).to(values.device)
        return values.new_zeros(len(self)).index_add_(0, number, values)

    def at_end(self, values: torch.Tensor) -> torch.Tensor:
        """[rows, …] → [trajectories, …]: that of the last row."""
        return values if self.one_row_each else values[torch.from_numpy(self.last_rows).to(values.device)]

    def _place_tokens(self) -> None:
        """Which tokens of the rows are kept, [rows, response], and where in the joined table each of them goes."""
        mask = self._row_mask.bool()
        column = torch.arange(mask.shape[1], device=mask.device)
        lengths = torch.where(mask, column + 1, 0).amax(dim=-1)
        number = torch.from_numpy(self.of_row).to(mask.device)
        totals = lengths.new_zeros(len(self)).index_add_(0, number, lengths)
        in_order = torch.argsort(number, stable=True)
        ends = lengths[in_order].cumsum(0) - (totals.cumsum(0) - totals)[number[in_order]]
        starts = torch.empty_like(lengths)
        starts[in_order] = ends - lengths[in_order]
        self._shape = (len(self), max(1, int(totals.max())))  # where all is masked, estimators still have a column
        self._kept = column < lengths[:, None]
        self._places = ((number * self._shape[1] + starts)[:, None] + column)[self._kept]
