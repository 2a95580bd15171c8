"""Model inputs without left padding: rows packed into one, padded on the right, or split over sequence-parallel ranks.

Everything is computed on the host before it is copied, so that no pass has to wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TypeAlias, TypeVar

import torch
from torch.nn.functional import pad

from verl.models.ulysses import SequenceParallel
from verl.utils.device import copy_to_device

Rows = TypeVar("Rows", bound="TokenRows")
Seqlens: TypeAlias = tuple[torch.Tensor, torch.Tensor, int, int]
"""Arguments of a variable-length kernel: starts of the queries and of the keys of each sequence, int32 [S + 1], and the
largest number of each."""

# Sequences of a group are padded to the longest: by up to a quarter, or by a few tokens, which cost less than another
# call.
_MIN_LENGTH_RATIO = 0.75
_MAX_PADDING = 32


@dataclass(frozen=True)
class LengthGroup:
    """Sequences of similar length as a rectangular batch."""

    width: int
    """Length of the longest sequence."""
    tokens: torch.Tensor | None
    """[sequences * width] indices of packed tokens; padding repeats the last token of a sequence. None: all tokens."""


class Packing:
    """The boundaries of the sequences in a packed row; immutable.

    Not a dataclass: FSDP would copy it before every layer, and the cached `groups` would be lost.
    """

    def __init__(
        self,
        cu_seqlens: torch.Tensor,
        lengths: tuple[int, ...],
        max_length: int,
        sequence_parallel: SequenceParallel | None = None,
    ) -> None:
        """`cu_seqlens` int32 [S + 1]: start of each sequence, then the number of tokens. `lengths`: tokens of each, at
        least 1. With `sequence_parallel` each rank of the group has a slice of the tokens, and attention exchanges
        heads for tokens.
        """
        self.cu_seqlens = cu_seqlens
        self.lengths = lengths
        self.max_length = max_length
        self.sequence_parallel = sequence_parallel

    @staticmethod
    def from_lengths(lengths: Sequence[int]) -> Packing:
        """Return the packing of sequences with these lengths, on the host."""
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return Packing(starts, tuple(lengths), max(lengths, default=0))

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def seqlens(self) -> Seqlens:
        """Arguments of a kernel for attention within each sequence."""
        return self.cu_seqlens, self.cu_seqlens, self.max_length, self.max_length

    def with_starts(self, cu_seqlens: torch.Tensor) -> Packing:
        """Return a copy with another `cu_seqlens`, on another device."""
        return Packing(cu_seqlens, self.lengths, self.max_length, self.sequence_parallel)

    def with_sequence_parallel(self, parallel: SequenceParallel) -> Packing:
        return Packing(self.cu_seqlens, self.lengths, self.max_length, parallel)

    def padded(self, extra: int) -> Packing:
        """Return a copy on the host with one more sequence of `extra` tokens."""
        return Packing.from_lengths([*self.lengths, extra])

    @cached_property
    def groups(self) -> tuple[tuple[LengthGroup, ...], torch.Tensor | None]:
        """Return the sequences grouped by similar length, and for each packed token [total] its index in the
        concatenated groups (None: unchanged).
        """
        if len(set(self.lengths)) == 1:
            return (LengthGroup(self.max_length, None),), None
        starts = [0, *accumulate(self.lengths)]
        packed_index = torch.empty(self.total, dtype=torch.long)
        groups, offset = [], 0
        for members in _group_by_length(self.lengths):
            lengths = torch.tensor([self.lengths[i] for i in members])[:, None]
            first = torch.tensor([starts[i] for i in members])[:, None]
            width = int(lengths.max())
            column = torch.arange(width)
            tokens = first + column.minimum(lengths - 1)
            valid = column < lengths
            packed_index[tokens[valid]] = offset + valid.flatten().nonzero()[:, 0]
            groups.append((width, tokens.flatten()))
            offset += tokens.numel()
        device = self.cu_seqlens.device
        *copied, packed_index = copy_to_device([*(tokens for _, tokens in groups), packed_index], device)
        return tuple(LengthGroup(width, at) for (width, _), at in zip(groups, copied, strict=True)), packed_index


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """Rows without left padding, and the positions of their response tokens."""

    input_ids: torch.Tensor
    """[b, n]; packed, [1, T]."""
    rows: torch.Tensor
    """[N] row of each attended response token."""
    columns: torch.Tensor
    """[N] column of the response token in `responses`."""
    before: torch.Tensor
    """[N] index in the flattened `input_ids` of the token before the response token: its hidden state predicts the
    response token."""
    labels: torch.Tensor
    """[N] id of the response token; or [N, 1 + K] with the ids of K alternative tokens after it."""
    last: torch.Tensor
    """[b] index of each row's last token in the flattened `input_ids`."""


@dataclass(frozen=True, kw_only=True)
class PackedRows(TokenRows):
    """Several rows concatenated to one."""

    position_ids: torch.Tensor
    """[1, T], starting at 0 in every sequence."""
    packing: Packing

    def to(self, device: torch.device) -> PackedRows:
        """Copy to the device asynchronously."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        *moved, starts = copy_to_device([*tensors.values(), self.packing.cu_seqlens], device)
        return replace(self, packing=self.packing.with_starts(starts), **dict(zip(tensors, moved, strict=True)))


def packed_rows(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, response_length: int = 0, pad_token_id: int = 0
) -> PackedRows:
    """Pack rows: `input_ids`, `attention_mask` [b, P+R] on the host; the last R columns are responses.

    A row without tokens becomes one padding token, so that the number of rows does not change.
    """
    mask = attention_mask.bool()
    first = mask.shape[1] - response_length
    rows, columns = mask[:, first:].nonzero(as_tuple=True)
    packed = packed_tokens(mask)
    if packed is not mask:
        input_ids = input_ids.masked_fill(packed & ~mask, pad_token_id)
    lengths = packed.sum(dim=1)
    in_row = packed.long().cumsum(dim=1) - 1
    check_prompts(rows, in_row[rows, first + columns])
    starts = lengths.cumsum(0) - lengths
    return PackedRows(
        input_ids=input_ids[packed][None],
        position_ids=in_row[packed][None],
        packing=Packing.from_lengths(lengths.tolist()),
        rows=rows,
        columns=columns,
        before=starts[rows] + in_row[rows, first + columns] - 1,
        labels=input_ids[rows, first + columns],
        last=starts + lengths - 1,
    )


def with_alternatives(rows: Rows, ids: torch.Tensor) -> Rows:
    """Return rows with alternative tokens for each response token in `labels`: `ids` [b, R, K]."""
    others = ids[rows.rows, rows.columns].to(rows.labels.dtype)
    return replace(rows, labels=torch.cat([rows.labels[:, None], others], dim=1))


def packed_tokens(mask: torch.Tensor) -> torch.Tensor:
    """Return the mask [b, P+R] of the tokens that are packed: attended ones; the first column of rows without any."""
    mask = mask.bool()
    empty = ~mask.any(dim=1)
    if bool(empty.any()):
        mask = mask.clone()
        mask[empty, 0] = True
    return mask


def check_prompts(rows: torch.Tensor, positions: torch.Tensor) -> None:
    """Raise ValueError for a response token that is the first of its row, since nothing predicts it.

    `rows`, `positions` [N]: row of each response token, and its position in the row.
    """
    first = positions < 1
    if bool(first.any()):
        raise ValueError(
            f"attention_mask: row {int(rows[first][0])} has a response but no prompt token before it. "
            "Every prompt needs at least one token."
        )


def _group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Return indices grouped by similar length, longest first; sorted within a group."""
    groups: list[list[int]] = []
    width = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not groups or lengths[i] < min(_MIN_LENGTH_RATIO * width, width - _MAX_PADDING):
            groups.append([])
            width = lengths[i]
        groups[-1].append(i)
    return [sorted(group) for group in groups]


# ---------------------------------------------------------------- rows with padding


@dataclass(frozen=True, kw_only=True)
class RightPaddedRows(TokenRows):
    """Rows padded on the right to the longest."""

    attention_mask: torch.Tensor
    """[b, n]."""

    def to(self, device: torch.device) -> RightPaddedRows:
        """Copy to the device asynchronously."""
        return RightPaddedRows(**dict(zip(vars(self), copy_to_device(list(vars(self).values()), device), strict=True)))


def right_padded_rows(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, response_length: int = 0, pad_token_id: int = 0
) -> RightPaddedRows:
    """Move the padding to the right: `input_ids`, `attention_mask` [b, P+R]; the last R columns are responses."""
    mask = attention_mask.bool()
    lengths = mask.sum(dim=1)
    longest = max(1, int(lengths.max())) if len(lengths) else 1
    order = mask.int().argsort(dim=1, descending=True, stable=True)[:, :longest]
    attended = torch.arange(longest) < lengths[:, None]
    ids = torch.where(attended, input_ids.gather(1, order), pad_token_id)
    position = mask.long().cumsum(dim=1) - 1
    first = mask.shape[1] - response_length
    rows, columns = mask[:, first:].nonzero(as_tuple=True)
    in_row = position[rows, first + columns]
    check_prompts(rows, in_row)
    starts = torch.arange(len(mask)) * longest
    return RightPaddedRows(
        input_ids=ids,
        attention_mask=attended.long(),
        rows=rows,
        columns=columns,
        before=starts[rows] + in_row - 1,
        labels=input_ids[rows, first + columns],
        last=starts + lengths.clamp(min=1) - 1,
    )


# ---------------------------------------------------------------- sequence parallelism


@dataclass(frozen=True, kw_only=True)
class SequenceParallelRows(PackedRows):
    """A rank's slice of packed rows: `input_ids`, `position_ids`, `before`, `labels` and `last` are of this rank,
    `rows` and `columns` of the whole group.

    A rank without response tokens has one dummy entry, which `gather_responses` and `gather_rows` drop, so that the
    head gets a (zero) gradient on every rank, as FSDP requires.
    """

    row_places: torch.Tensor
    """[b] index of each row in the order of the rows' last tokens, in which `gather` returns their values."""
    responses_per_rank: tuple[int, ...]
    rows_per_rank: tuple[int, ...]

    def gather_responses(self, values: torch.Tensor) -> torch.Tensor:
        """Gather the values at `before` of all ranks: [N, ...]."""
        assert self.packing.sequence_parallel is not None
        return self.packing.sequence_parallel.gather(values, self.responses_per_rank)

    def gather_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Gather the values at `last` of all ranks: [b, ...]."""
        assert self.packing.sequence_parallel is not None
        return self.packing.sequence_parallel.gather(values, self.rows_per_rank).index_select(0, self.row_places)


def sequence_parallel_rows(rows: PackedRows, parallel: SequenceParallel) -> SequenceParallelRows:
    """Return this rank's slice of `rows`, which are on the host and the same on every rank of the group."""
    padded = parallel.padded(rows.packing.total)
    rows, part = pad_packed_rows(rows, padded), parallel.part(padded)
    rows = _sorted_responses(rows)
    row_order = rows.last.argsort(stable=True)
    last = rows.last[row_order]
    responses, lasts = parallel.counts_per_rank(rows.before, padded), parallel.counts_per_rank(last, padded)
    local_responses = _rank_slice(responses, parallel.rank)
    return SequenceParallelRows(
        input_ids=rows.input_ids[:, part],
        position_ids=rows.position_ids[:, part],
        packing=rows.packing.with_sequence_parallel(parallel),
        rows=rows.rows,
        columns=rows.columns,
        before=_at_least_one(rows.before[local_responses] - part.start),
        labels=_at_least_one(rows.labels[local_responses]),
        last=_at_least_one(last[_rank_slice(lasts, parallel.rank)] - part.start),
        row_places=row_order.argsort(),
        responses_per_rank=tuple(responses),
        rows_per_rank=tuple(lasts),
    )


def _sorted_responses(rows: PackedRows) -> PackedRows:
    """Return rows whose response tokens are ordered by `before`, as needed to divide them among ranks."""
    order = rows.before.argsort(stable=True)
    fields = {name: getattr(rows, name)[order] for name in ("rows", "columns", "before", "labels")}
    return replace(rows, **fields)


def pad_packed_rows(rows: PackedRows, tokens: int) -> PackedRows:
    """Pad rows on the host to `tokens` tokens; the padding is a separate sequence."""
    extra = tokens - rows.packing.total
    if not extra:
        return rows
    return replace(
        rows,
        input_ids=pad(rows.input_ids, (0, extra)),
        position_ids=torch.cat([rows.position_ids, torch.arange(extra)[None]], dim=1),
        packing=rows.packing.padded(extra),
    )


def _rank_slice(counts: list[int], rank: int) -> slice:
    first = sum(counts[:rank])
    return slice(first, first + counts[rank])


def _at_least_one(values: torch.Tensor) -> torch.Tensor:
    """Return `values`, or a single 0 if it is empty."""
    return values if len(values) else values.new_zeros(1, *values.shape[1:])
