"""Hugging Face tensors put together from what the ranks of one copy of the model hold: whole, or the rows wanted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist

from verl.types.weights import TensorSlice, Wanted

Found = dict["str | TensorSlice", torch.Tensor]


@dataclass(frozen=True, eq=False)
class Held:
    """A rectangle of a Hugging Face tensor that one rank holds."""

    owner: int
    """Its number in the group of one copy."""
    weight: str
    """Core's name."""
    place: tuple[slice, ...]
    """Where it is in that rank's shard."""
    box: tuple[range, ...]
    """Where it is in the Hugging Face tensor."""

    @cached_property
    def width(self) -> int:
        """Elements of one of its rows."""
        return math.prod(map(len, self.box[1:]))

    def of(self, shards: Mapping[str, torch.Tensor], rows: range) -> torch.Tensor:
        """These rows of it, from the owner's shards."""
        own = shards[self.weight].detach()[self.place].view(tuple(map(len, self.box)))
        return own[rows.start - self.box[0].start : rows.stop - self.box[0].start]

    def put(self, target: torch.Tensor, first: int, rows: range, values: torch.Tensor) -> None:
        """These rows of it into `target`, which begins at row `first` of the Hugging Face tensor."""
        columns = tuple(slice(each.start, each.stop) for each in self.box[1:])
        values = values.view(len(rows), *map(len, self.box[1:]))
        target[(slice(rows.start - first, rows.stop - first), *columns)].copy_(values)


@dataclass(frozen=True)
class Copy:
    """The ranks that hold one copy of some weights between them, and who holds what."""

    group: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    held: Mapping[str, Sequence[Held]]
    """By Hugging Face name."""

    @cached_property
    def me(self) -> int:
        return self.ranks.index(dist.get_rank())


@dataclass(frozen=True, eq=False)
class Strip:
    """Some rows of a Hugging Face tensor on their way, in `dtype`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: range

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.rows) * math.prod(self.shape[1:]) * self.dtype.itemsize

    def cut(self, max_bytes: int) -> Iterator[Strip]:
        """Strips of at most so many bytes, or of a row each."""
        step = max(1, len(self.rows) * max_bytes // max(1, self.size))
        for start in range(0, len(self.rows), step):
            yield replace(self, rows=self.rows[start : start + step])

    def wanted_by(self, wanted: Wanted) -> range:
        return common(self.rows, wanted.get(self.name, range(0)))

    def keyed(self, rows: range, tensor: torch.Tensor) -> Found:
        """These rows as a bucket has them."""
        return {self.name if len(rows) == self.shape[0] else TensorSlice(self.name, rows.start, rows.stop): tensor}

    def empty(self, rows: range, device: torch.device) -> torch.Tensor:
        return torch.empty((len(rows), *self.shape[1:]), dtype=self.dtype, device=device)


Part = tuple[Strip, Held, range]
"""Rows that are sent: of which strip, from which rectangle."""


def spread(strips: Sequence[Strip], copy: Copy, shards: Mapping[str, torch.Tensor], device: torch.device) -> Found:
    """All of the strips on every rank of the copy: each rank in turn gives its part to all others."""
    if len(copy.ranks) == 1:
        return {key: value for strip in strips for key, value in _own(strip, copy, shards, device).items()}
    targets = {strip: strip.empty(strip.rows, device) for strip in strips}
    for dtype in dict.fromkeys(strip.dtype for strip in strips):
        alike = [strip for strip in strips if strip.dtype == dtype]
        for owner, parts in enumerate(_parts(alike, copy, _all_rows)):
            if parts:
                _give(targets, owner, parts, copy, shards)
    return {key: value for strip, target in targets.items() for key, value in strip.keyed(strip.rows, target).items()}


def _give(
    targets: Mapping[Strip, torch.Tensor],
    owner: int,
    parts: Sequence[Part],
    copy: Copy,
    shards: Mapping[str, torch.Tensor],
) -> None:
    """One rank's part into everybody's targets; what it travelled in is let go before the next rank's is made."""
    like = targets[parts[0][0]]
    flat = torch.empty(_elements(parts), dtype=like.dtype, device=like.device)
    if owner == copy.me:
        _fill(flat, parts, shards)
    dist.broadcast(flat, src=copy.ranks[owner], group=copy.group)
    for (strip, held, rows), values in zip(parts, _split(flat, parts), strict=True):
        held.put(targets[strip], strip.rows.start, rows, values)


def _own(strip: Strip, copy: Copy, shards: Mapping[str, torch.Tensor], device: torch.device) -> Found:
    """Of a rank that holds everything: where a shard is the tensor, itself."""
    (parts,) = _parts([strip], copy, _all_rows)
    if len(parts) == 1:
        return strip.keyed(strip.rows, parts[0][1].of(shards, parts[0][2]).to(device, strip.dtype))
    target = strip.empty(strip.rows, device)
    for _, held, rows in parts:
        held.put(target, strip.rows.start, rows, held.of(shards, rows))
    return strip.keyed(strip.rows, target)


def exchanged(
    strips: Sequence[Strip],
    copy: Copy,
    shards: Mapping[str, torch.Tensor],
    device: torch.device,
    wanted: Sequence[Wanted],
    max_bytes: int,
) -> Found:
    """Every rank of the copy sends every other what that wants of its part; `wanted` of all ranks there are.

    As many ranks are served at a time as keeps what each sends below `max_bytes`.
    """
    theirs = [wanted[rank] for rank in copy.ranks]
    found: Found = {}
    for dtype in dict.fromkeys(strip.dtype for strip in strips):
        alike = [strip for strip in strips if strip.dtype == dtype]
        known = {id(each): _parts(alike, copy, _rows_of(each)) for each in theirs}
        parts = [known[id(each)] for each in theirs]
        received: list[torch.Tensor] = []
        for served in _rounds(parts, max_bytes // dtype.itemsize):
            flat = _one_round(parts, served, copy, shards, dtype, device)
            received = received if flat is None else flat
        found |= _placed(alike, parts[copy.me], received, theirs[copy.me], device)
    return found


def _one_round(
    parts: Sequence[Sequence[Sequence[Part]]],
    served: range,
    copy: Copy,
    shards: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> list[torch.Tensor] | None:
    """`parts` by who gets them and who has them; what this rank gets of each, if it is served."""
    outgoing = [parts[rank][copy.me] if rank in served else [] for rank in range(len(copy.ranks))]
    mine = copy.me in served
    incoming = [each if mine else [] for each in parts[copy.me]]
    sizes = [[_elements(each) for each in way] for way in (outgoing, incoming)]
    sent, received = (torch.empty(sum(way), dtype=dtype, device=device) for way in sizes)
    _fill(sent, [part for each in outgoing for part in each], shards)
    if len(copy.ranks) == 1:
        return [sent]
    dist.all_to_all_single(received, sent, sizes[1], sizes[0], group=copy.group)
    return list(received.split(sizes[1])) if mine else None


def _rounds(parts: Sequence[Sequence[Sequence[Part]]], limit: int) -> Iterator[range]:
    """Ranks that are served together, by their numbers; nothing where nobody wants anything."""
    first, sums = 0, [0] * len(parts)
    for rank, owners in enumerate(parts):
        sizes = [_elements(each) for each in owners]
        if max(sums) and max(map(sum, zip(sums, sizes, strict=True))) > limit:
            yield range(first, rank)
            first, sums = rank, [0] * len(parts)
        sums = [so_far + size for so_far, size in zip(sums, sizes, strict=True)]
    if any(sums):
        yield range(first, len(parts))


def _placed(
    strips: Sequence[Strip],
    parts: Sequence[Sequence[Part]],
    received: Sequence[torch.Tensor],
    wanted: Wanted,
    device: torch.device,
) -> Found:
    """What this rank got, as it wants it."""
    ranges = {strip: rows for strip in strips if (rows := strip.wanted_by(wanted))}
    targets = {strip: strip.empty(rows, device) for strip, rows in ranges.items()}
    for each, flat in zip(parts, received, strict=False):
        for (strip, held, rows), values in zip(each, _split(flat, each), strict=True):
            held.put(targets[strip], ranges[strip].start, rows, values)
    return {key: value for strip, rows in ranges.items() for key, value in strip.keyed(rows, targets[strip]).items()}


def on_first_rank(
    name: str,
    shape: tuple[int, ...],
    copy: Copy,
    shards: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
) -> torch.Tensor | None:
    """The whole tensor, in host memory of rank 0 alone; a collective of `group` for the ranks of its copy."""
    if 0 not in copy.ranks:
        return None
    strip, rank = Strip(name, shape, dtype, range(shape[0])), dist.get_rank()
    cpu = torch.device("cpu")
    target = strip.empty(strip.rows, cpu) if rank == 0 else None
    for sender, parts in zip(copy.ranks, _parts([strip], copy, _all_rows), strict=True):
        if parts and rank in (0, sender):
            _bring(target, sender, parts, shards, dtype, group)
    return target


def _bring(
    target: torch.Tensor | None,
    sender: int,
    parts: Sequence[Part],
    shards: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
) -> None:
    """One rank's part into rank 0's `target`; what it travelled in is let go before the next rank's is made."""
    flat = torch.empty(_elements(parts), dtype=dtype)
    if dist.get_rank() == sender:
        _fill(flat, parts, shards)
    if target is None:
        dist.send(flat, dst=0, group=group)
        return
    if sender != 0:
        dist.recv(flat, src=sender, group=group)
    for (_, held, rows), values in zip(parts, _split(flat, parts), strict=True):
        held.put(target, 0, rows, values)


def _parts(strips: Iterable[Strip], copy: Copy, of: Callable[[Strip], range]) -> list[list[Part]]:
    """By owner: what it has of the rows that `of` says."""
    found: list[list[Part]] = [[] for _ in copy.ranks]
    for strip in strips:
        asked = of(strip)
        for held in copy.held[strip.name]:
            if rows := common(asked, held.box[0]):
                found[held.owner].append((strip, held, rows))
    return found


def _all_rows(strip: Strip) -> range:
    return strip.rows


def _rows_of(wanted: Wanted) -> Callable[[Strip], range]:
    return lambda strip: strip.wanted_by(wanted)


def _elements(parts: Iterable[Part]) -> int:
    return sum(len(rows) * held.width for _, held, rows in parts)


def _split(flat: torch.Tensor, parts: Iterable[Part]) -> Sequence[torch.Tensor]:
    return flat.split([len(rows) * held.width for _, held, rows in parts])


def _fill(flat: torch.Tensor, parts: Sequence[Part], shards: Mapping[str, torch.Tensor]) -> None:
    for (_, held, rows), place in zip(parts, _split(flat, parts), strict=True):
        own = held.of(shards, rows)
        place.view(own.shape).copy_(own)


def common(one: range, other: range) -> range:
    """Numbers of both."""
    return range(max(one.start, other.start), min(one.stop, other.stop))
