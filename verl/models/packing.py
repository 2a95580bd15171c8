"""Rows without padding: the attended tokens of all rows, one after the other in a single row.

Everything here is worked out on the host, before anything moves, so that no pass waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TypeVar

import torch

from verl.models.ulysses import SequenceParallel
from verl.utils.device import copy_to_device

Rows = TypeVar("Rows", bound="TokenRows")

# Sequences are padded to the longest of their group: by up to a quarter, or by a few tokens, which cost less than
# another call.
_SIMILAR_SHARE = 0.75
_SIMILAR_TOKENS = 32


@dataclass(frozen=True)
class LengthGroup:
    """Sequences of similar length as a rectangle."""

    width: int
    """Tokens of its longest sequence."""
    tokens: torch.Tensor | None
    """[sequences * width] packed places; padding repeats the last token of its sequence. None: all, as they are."""


class Packing:
    """Where the sequences of one packed row begin; treat it as frozen.

    No dataclass: FSDP takes those apart and builds them anew in front of every layer, and `groups` would be lost.
    """

    def __init__(
        self,
        cu_seqlens: torch.Tensor,
        lengths: tuple[int, ...],
        max_length: int,
        sequence_parallel: SequenceParallel | None = None,
    ) -> None:
        """`cu_seqlens` int32 [S + 1]: where each sequence begins, then the number of tokens. `lengths`: the tokens of
        each, at least 1. With `sequence_parallel` each rank of the group has its share of the tokens, and attention
        exchanges heads for tokens.
        """
        self.cu_seqlens = cu_seqlens
        self.lengths = lengths
        self.max_length = max_length
        self.sequence_parallel = sequence_parallel

    @staticmethod
    def of(lengths: Sequence[int]) -> Packing:
        """Sequences of these lengths, on the host."""
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return Packing(starts, tuple(lengths), max(lengths, default=0))

    @property
    def total(self) -> int:
        return sum(self.lengths)

    def with_starts(self, cu_seqlens: torch.Tensor) -> Packing:
        """The same with its tensor elsewhere."""
        return Packing(cu_seqlens, self.lengths, self.max_length, self.sequence_parallel)

    def shared_by(self, parallel: SequenceParallel) -> Packing:
        return Packing(self.cu_seqlens, self.lengths, self.max_length, parallel)

    @cached_property
    def groups(self) -> tuple[tuple[LengthGroup, ...], torch.Tensor | None]:
        """The sequences by similar length, and [total] the place of each packed token among the groups' places (None:
        where it is).
        """
        if len(set(self.lengths)) == 1:
            return (LengthGroup(self.max_length, None),), None
        starts = [0, *accumulate(self.lengths)]
        home = torch.empty(self.total, dtype=torch.long)
        found, before = [], 0
        for members in _similar(self.lengths):
            lengths = torch.tensor([self.lengths[i] for i in members])[:, None]
            first = torch.tensor([starts[i] for i in members])[:, None]
            width = int(lengths.max())
            column = torch.arange(width)
            places = first + column.minimum(lengths - 1)
            real = column < lengths
            home[places[real]] = before + real.flatten().nonzero()[:, 0]
            found.append((width, places.flatten()))
            before += places.numel()
        *tokens, home = copy_to_device([*(places for _, places in found), home], self.cu_seqlens.device)
        return tuple(LengthGroup(width, at) for (width, _), at in zip(found, tokens, strict=True)), home


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """Rows without their padding, and where each response token came from."""

    input_ids: torch.Tensor
    """[b, n]; packed, [1, T]."""
    rows: torch.Tensor
    """[N] row of each attended response token."""
    columns: torch.Tensor
    """[N] its column in `responses`."""
    before: torch.Tensor
    """[N] the place in the flattened `input_ids` of the token before it, whose hidden state predicts it."""
    labels: torch.Tensor
    """[N] its id; or [N, 1 + K], with those of tokens that could have been in its place."""
    last: torch.Tensor
    """[b] the place of each row's last token in the flattened `input_ids`."""


@dataclass(frozen=True, kw_only=True)
class PackedRows(TokenRows):
    """The tokens of several rows in one."""

    position_ids: torch.Tensor
    """[1, T], from 0 in every sequence."""
    packing: Packing

    def to(self, device: torch.device) -> PackedRows:
        """Without waiting for it."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        *moved, starts = copy_to_device([*tensors.values(), self.packing.cu_seqlens], device)
        return replace(self, packing=self.packing.with_starts(starts), **dict(zip(tensors, moved, strict=True)))


def packed_rows(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, response_length: int = 0, pad_token_id: int = 0
) -> PackedRows:
    """`input_ids`, `attention_mask` [b, P+R] on the host, the last R columns responses. Without any token a row is
    one padding token, so every row keeps its place.
    """
    mask = attention_mask.bool()
    first = mask.shape[1] - response_length
    rows, columns = mask[:, first:].nonzero(as_tuple=True)
    kept = kept_tokens(mask)
    if kept is not mask:
        input_ids = input_ids.masked_fill(kept & ~mask, pad_token_id)
    lengths = kept.sum(dim=1)
    in_row = kept.long().cumsum(dim=1) - 1
    refuse_lone_responses(rows, in_row[rows, first + columns])
    starts = lengths.cumsum(0) - lengths
    return PackedRows(
        input_ids=input_ids[kept][None],
        position_ids=in_row[kept][None],
        packing=Packing.of(lengths.tolist()),
        rows=rows,
        columns=columns,
        before=starts[rows] + in_row[rows, first + columns] - 1,
        labels=input_ids[rows, first + columns],
        last=starts + lengths - 1,
    )


def with_alternatives(rows: Rows, ids: torch.Tensor) -> Rows:
    """The same with other tokens for each response token: `ids` [b, R, K]."""
    others = ids[rows.rows, rows.columns].to(rows.labels.dtype)
    return replace(rows, labels=torch.cat([rows.labels[:, None], others], dim=1))


def kept_tokens(mask: torch.Tensor) -> torch.Tensor:
    """[b, P+R] bool: what of the rows is packed, in order: attended tokens; of a row without any, its first column."""
    mask = mask.bool()
    empty = ~mask.any(dim=1)
    if bool(empty.any()):
        mask = mask.clone()
        mask[empty, 0] = True
    return mask


def refuse_lone_responses(rows: torch.Tensor, places: torch.Tensor) -> None:
    """`places` [N] of response tokens in their rows [N]: one at 0 has nothing that predicts it."""
    lone = places < 1
    if bool(lone.any()):
        raise ValueError(
            f"attention_mask: row {int(rows[lone][0])} has a response but no prompt token before it. "
            "Every prompt needs at least one."
        )


def _similar(lengths: Sequence[int]) -> list[list[int]]:
    """Indices grouped by length, longest first; in their order where one group holds all."""
    groups: list[list[int]] = []
    width = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not groups or lengths[i] < min(_SIMILAR_SHARE * width, width - _SIMILAR_TOKENS):
            groups.append([])
            width = lengths[i]
        groups[-1].append(i)
    return [sorted(group) for group in groups]
