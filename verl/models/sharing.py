"""Packed rows shared by the ranks of a sequence-parallel group: each has a slice of the tokens and predicts with it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from verl.models.packing import PackedRows, Packing
from verl.models.ulysses import SequenceParallel


@dataclass(frozen=True, kw_only=True)
class SharedRows(PackedRows):
    """`input_ids`, `position_ids`, `before`, `labels` and `last` are this rank's; `rows` and `columns` are everyone's.

    A rank whose slice predicts nothing still has one entry, which `of_responses` and `of_rows` drop: the head's weights
    then get a gradient (of zero) on every rank, as sharding needs.
    """

    responses_per_rank: tuple[int, ...]
    rows_per_rank: tuple[int, ...]

    def of_responses(self, values: torch.Tensor) -> torch.Tensor:
        """What this rank found at `before` -> what all ranks did, [N, ...]."""
        assert self.packing.sequence_parallel is not None
        return self.packing.sequence_parallel.gather(values, self.responses_per_rank)

    def of_rows(self, values: torch.Tensor) -> torch.Tensor:
        """What this rank found at `last` -> what all ranks did, [b, ...]."""
        assert self.packing.sequence_parallel is not None
        return self.packing.sequence_parallel.gather(values, self.rows_per_rank)


def shared_rows(rows: PackedRows, parallel: SequenceParallel) -> SharedRows:
    """This rank's share of `rows` (on the host, the same on every rank of the group)."""
    padded = parallel.padded(rows.packing.total)
    rows, part = padded_rows(rows, padded), parallel.part(padded)
    responses, lasts = parallel.counts_of(rows.before, padded), parallel.counts_of(rows.last, padded)
    mine = _own(responses, parallel.rank)
    return SharedRows(
        input_ids=rows.input_ids[:, part],
        position_ids=rows.position_ids[:, part],
        packing=rows.packing.shared_by(parallel),
        rows=rows.rows,
        columns=rows.columns,
        before=_or_one(rows.before[mine] - part.start),
        labels=_or_one(rows.labels[mine]),
        last=_or_one(rows.last[_own(lasts, parallel.rank)] - part.start),
        responses_per_rank=tuple(responses),
        rows_per_rank=tuple(lasts),
    )


def padded_rows(rows: PackedRows, tokens: int) -> PackedRows:
    """The same (on the host) with so many tokens. Those that are added are a sequence of their own, which no other
    looks at."""
    extra = tokens - rows.packing.total
    if not extra:
        return rows
    return replace(
        rows,
        input_ids=pad(rows.input_ids, (0, extra)),
        position_ids=torch.cat([rows.position_ids, torch.arange(extra)[None]], dim=1),
        packing=Packing.of([*rows.packing.lengths, extra]),
    )


def _own(counts: list[int], rank: int) -> slice:
    first = sum(counts[:rank])
    return slice(first, first + counts[rank])


def _or_one(values: torch.Tensor) -> torch.Tensor:
    """`values`, or a single 0 where there are none."""
    return values if len(values) else values.new_zeros(1, *values.shape[1:])
