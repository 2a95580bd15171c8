"""Token sequences of different lengths: kept flat, cut to a limit, padded to a width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

TRUNCATIONS = ("error", "left", "right", "middle")


class TokenStore:
    """Many token sequences in two flat arrays: no object per row, cheap to share with worker processes."""

    def __init__(self, sequences: Iterable[Sequence[int]] = ()) -> None:
        lengths = []
        chunks = []
        for sequence in sequences:
            chunks.append(np.asarray(sequence, dtype=np.int32))
            lengths.append(len(sequence))
        self.lengths = np.array(lengths, dtype=np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
        self._values = np.concatenate(chunks) if chunks else np.zeros(0, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> list[int]:
        return self._values[self._starts[row] : self._starts[row + 1]].tolist()


def truncated(ids: list[int], limit: int, how: str) -> list[int]:
    """At most `limit` tokens: `left` drops the beginning, `right` the end, `middle` keeps both ends."""
    if len(ids) <= limit:
        return ids
    if how == "left":
        return ids[-limit:]
    if how == "right":
        return ids[:limit]
    if how == "middle":
        head = limit // 2
        return ids[:head] + ids[len(ids) - (limit - head) :]
    raise ValueError(
        f"data.truncation: {how!r} is not one of {', '.join(TRUNCATIONS)}, or may not cut {len(ids)} tokens."
    )


def padded(ids: Sequence[int], width: int, fill: int, left: bool) -> torch.Tensor:
    """[width] int64 with `fill` before (left) or after the tokens."""
    row = torch.full((width,), fill, dtype=torch.int64)
    if ids:
        row[slice(width - len(ids), None) if left else slice(0, len(ids))] = torch.tensor(ids, dtype=torch.int64)
    return row
