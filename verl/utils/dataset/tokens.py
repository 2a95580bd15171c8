"""Token sequences of different lengths: kept in one column, cut to a limit, padded to a width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

TRUNCATIONS = ("error", "left", "right", "middle")
TOKENS = pa.large_list(pa.int32())
WEIGHTS = pa.large_list(pa.float32())


class TokenStore:
    """Many token sequences in one arrow column: no object per row, so processes share it, in memory or from a file."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self.column = column
        self.lengths: np.ndarray = pc.list_value_length(column).to_numpy()

    @classmethod
    def of(cls, sequences: Iterable[Sequence[float] | np.ndarray], kind: pa.DataType = TOKENS) -> TokenStore:
        return cls(pa.chunked_array([pa.array(list(sequences), kind)], kind))

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, row: int) -> np.ndarray:
        """[length of the row], of the column's type, read-only."""
        return self.column[row].values.to_numpy()


def truncated(ids: Sequence[float] | np.ndarray, limit: int, how: str) -> np.ndarray:
    """At most `limit` tokens: `left` drops the beginning, `right` the end, `middle` keeps both ends."""
    row = np.asarray(ids)
    if len(row) <= limit:
        return row
    if how == "left":
        return row[-limit:]
    if how == "right":
        return row[:limit]
    if how == "middle":
        head = limit // 2
        return np.concatenate([row[:head], row[len(row) - (limit - head) :]])
    raise ValueError(
        f"data.truncation: {how!r} is not one of {', '.join(TRUNCATIONS)}, or may not cut {len(row)} tokens."
    )


def left_padded(ids: np.ndarray, width: int, fill: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[width] int64 with `fill` before the tokens, and [width] int64 with 1 on the tokens."""
    row = torch.full((width,), fill, dtype=torch.int64)
    mask = torch.zeros(width, dtype=torch.int64)
    if len(ids):
        row[width - len(ids) :] = torch.from_numpy(ids.astype(np.int64))
        mask[width - len(ids) :] = 1
    return row, mask
