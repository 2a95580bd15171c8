"""A rank's rows cut into micro-batches, with the same number of them on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verl.protocol import DataProto
from verl.utils.balancing import ceildiv, get_seqlen_balanced_partitions
from verl.workers.engine.base import Counts, Metrics, MicroBatching


def micro_batch_rows(lengths: Sequence[int], micro: MicroBatching) -> list[list[int]]:
    """Row indices of each micro-batch; every row exactly once. `lengths` are tokens per row."""
    rows = list(range(len(lengths)))
    for key, value in (("size", micro.size), ("max_tokens", micro.max_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"micro batch {key}: {value} leaves no room for a row. Use 1 or more.")
    if not rows:
        return []
    if micro.max_tokens is not None:
        return _within_budget(lengths, micro.max_tokens)
    size = micro.size or len(rows)
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def row_lengths(data: DataProto) -> list[int]:
    """Attended tokens per row."""
    return data.batch["attention_mask"].sum(dim=1).tolist()


def filler_batch(data: DataProto) -> DataProto:
    """One row like those of `data` (also of none), made of zeros and all attended.

    A rank that has run out of rows still takes part in the other ranks' collectives with it.
    """
    tensors = {key: torch.zeros((1, *value.shape[1:]), dtype=value.dtype) for key, value in data.batch.items()}
    tensors["attention_mask"] = torch.ones_like(tensors["attention_mask"])
    return DataProto.from_dict(tensors)


def local_counts(data: DataProto) -> Counts:
    """This rank's valid tokens and sequences."""
    mask = data.batch["response_mask"] != 0
    return Counts(tokens=float(mask.sum()), sequences=float(mask.any(dim=1).sum()))


class MetricSums:
    """(sum, count) pairs added up where they are; they leave the device once, at the end."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float | torch.Tensor, float | torch.Tensor]] = {}

    def add(self, name: str, total: float | torch.Tensor, count: float | torch.Tensor) -> None:
        total, count = (part.detach() if isinstance(part, torch.Tensor) else part for part in (total, count))
        before = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (before[0] + total, before[1] + count)

    def result(self) -> Metrics:
        return {name: (float(total), float(count)) for name, (total, count) in self._sums.items()}


def _within_budget(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """As few balanced parts as keep every one within the budget; a row over it stands alone."""
    for parts in range(ceildiv(sum(lengths), budget) or 1, len(lengths)):
        partition = get_seqlen_balanced_partitions(lengths, parts, equal_size=False)
        if all(len(rows) == 1 or sum(lengths[row] for row in rows) <= budget for rows in partition):
            return partition
    return [[row] for row in range(len(lengths))]
