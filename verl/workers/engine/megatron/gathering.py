"""Gather Hugging Face tensors from the ranks of one copy of the model: whole, or the requested rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import torch
import torch.distributed as dist

from verl.types.weights import BucketTensors, RequestedRows, bucket_key, overlap


@dataclass(frozen=True, eq=False)
class HeldRectangle:
    """A rectangle of a Hugging Face tensor that one rank holds."""

    owner: int
    """Index of the rank in the group of the model copy."""
    weight: str
    """Core's name."""
    place: tuple[slice, ...]
    """Position in that rank's shard."""
    box: tuple[range, ...]
    """Position in the Hugging Face tensor."""

    @cached_property
    def width(self) -> int:
        """Elements of one of its rows."""
        return math.prod(map(len, self.box[1:]))

    def read(self, shards: Mapping[str, torch.Tensor], rows: range) -> torch.Tensor:
        """Return these rows from the owner's shards."""
        values = shards[self.weight].detach()[self.place].view(tuple(map(len, self.box)))
        return values[rows.start - self.box[0].start : rows.stop - self.box[0].start]

    def write(self, target: torch.Tensor, first: int, rows: range, values: torch.Tensor) -> None:
        """Copy these rows into `target`, which starts at row `first` of the Hugging Face tensor."""
        columns = tuple(slice(dim.start, dim.stop) for dim in self.box[1:])
        place = (slice(rows.start - first, rows.stop - first), *columns)
        target[place].copy_(values.view(len(rows), *map(len, self.box[1:])))


@dataclass(frozen=True)
class ModelCopy:
    """The ranks that together hold one copy of some weights, and the rectangles that each of them holds."""

    group: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    held: Mapping[str, Sequence[HeldRectangle]]
    """By Hugging Face name."""

    @cached_property
    def me(self) -> int:
        """This rank's index in the group."""
        return self.ranks.index(dist.get_rank())


@dataclass(frozen=True, eq=False)
class RowRange:
    """Rows of a Hugging Face tensor, to be sent in `dtype`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: range

    @property
    def nbytes(self) -> int:
        return len(self.rows) * math.prod(self.shape[1:]) * self.dtype.itemsize

    def split(self, max_bytes: int) -> Iterator[RowRange]:
        """Yield ranges of at most `max_bytes`, with at least one row each."""
        step = max(1, len(self.rows) * max_bytes // max(1, self.nbytes))
        for start in range(0, len(self.rows), step):
            yield replace(self, rows=self.rows[start : start + step])

    def requested_by(self, request: RequestedRows) -> range:
        """Return the requested rows of this range."""
        return overlap(self.rows, request.get(self.name, range(0)))

    def keyed(self, rows: range, tensor: torch.Tensor) -> BucketTensors:
        """Return these rows as entry of a bucket."""
        return {bucket_key(self.name, rows, self.shape[0]): tensor}

    def empty(self, rows: range, device: torch.device) -> torch.Tensor:
        return torch.empty((len(rows), *self.shape[1:]), dtype=self.dtype, device=device)


Transfer: TypeAlias = tuple[RowRange, HeldRectangle, range]
"""(range, rectangle, rows): rows of the range, to be sent from the rectangle."""


def gather_everywhere(
    ranges: Sequence[RowRange], copy: ModelCopy, shards: Mapping[str, torch.Tensor], device: torch.device
) -> BucketTensors:
    """Return all rows on every rank of the copy; each rank in turn broadcasts its part."""
    if len(copy.ranks) == 1:
        return {key: value for part in ranges for key, value in _own_rows(part, copy, shards, device).items()}
    targets = {part: part.empty(part.rows, device) for part in ranges}
    for dtype in dict.fromkeys(part.dtype for part in ranges):
        same_dtype = [part for part in ranges if part.dtype == dtype]
        for owner, transfers in enumerate(_transfers(same_dtype, copy)):
            if transfers:
                _broadcast(targets, owner, transfers, copy, shards)
    return {key: value for part, target in targets.items() for key, value in part.keyed(part.rows, target).items()}


def _broadcast(
    targets: Mapping[RowRange, torch.Tensor],
    owner: int,
    transfers: Sequence[Transfer],
    copy: ModelCopy,
    shards: Mapping[str, torch.Tensor],
) -> None:
    """Copy one rank's part into the targets of all ranks; frees its buffer before the next rank's is allocated."""
    like = targets[transfers[0][0]]
    flat = torch.empty(_elements(transfers), dtype=like.dtype, device=like.device)
    if owner == copy.me:
        _pack(flat, transfers, shards)
    dist.broadcast(flat, src=copy.ranks[owner], group=copy.group)
    for (part, held, rows), values in zip(transfers, _unpack(flat, transfers), strict=True):
        held.write(targets[part], part.rows.start, rows, values)


def _own_rows(
    part: RowRange, copy: ModelCopy, shards: Mapping[str, torch.Tensor], device: torch.device
) -> BucketTensors:
    """Return the rows of a rank that holds the whole copy; without copying, if one shard contains all of them."""
    (transfers,) = _transfers([part], copy)
    if len(transfers) == 1:
        return part.keyed(part.rows, transfers[0][1].read(shards, transfers[0][2]).to(device, part.dtype))
    target = part.empty(part.rows, device)
    for _, held, rows in transfers:
        held.write(target, part.rows.start, rows, held.read(shards, rows))
    return part.keyed(part.rows, target)


def exchange(
    ranges: Sequence[RowRange],
    copy: ModelCopy,
    shards: Mapping[str, torch.Tensor],
    device: torch.device,
    requested: Sequence[RequestedRows],
    max_bytes: int,
) -> BucketTensors:
    """Send each rank of the copy the rows it requests (all-to-all); return this rank's rows.

    `requested`: the requests of all global ranks. Ranks are served in rounds, so that no rank sends more than about
    `max_bytes` at once.
    """
    requests = [requested[rank] for rank in copy.ranks]
    result: BucketTensors = {}
    for dtype in dict.fromkeys(part.dtype for part in ranges):
        same_dtype = [part for part in ranges if part.dtype == dtype]
        by_request = {id(request): _transfers(same_dtype, copy, request) for request in requests}
        transfers = [by_request[id(request)] for request in requests]
        received: list[torch.Tensor] = []
        for served in _rounds(transfers, max_bytes // dtype.itemsize):
            own = _exchange_round(transfers, served, copy, shards, dtype, device)
            received = received if own is None else own
        result |= _assemble(same_dtype, transfers[copy.me], received, requests[copy.me], device)
    return result


def _exchange_round(
    transfers: Sequence[Sequence[Sequence[Transfer]]],
    served: range,
    copy: ModelCopy,
    shards: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> list[torch.Tensor] | None:
    """Send to the `served` ranks; return the buffer received from each rank, None if this rank is not served.

    `transfers` are indexed by receiver, then by owner.
    """
    outgoing = [transfers[rank][copy.me] if rank in served else [] for rank in range(len(copy.ranks))]
    is_served = copy.me in served
    incoming = [own if is_served else [] for own in transfers[copy.me]]
    out_sizes, in_sizes = ([_elements(part) for part in direction] for direction in (outgoing, incoming))
    sent = torch.empty(sum(out_sizes), dtype=dtype, device=device)
    received = torch.empty(sum(in_sizes), dtype=dtype, device=device)
    _pack(sent, [transfer for part in outgoing for transfer in part], shards)
    if len(copy.ranks) == 1:
        return [sent]
    dist.all_to_all_single(received, sent, in_sizes, out_sizes, group=copy.group)
    return list(received.split(in_sizes)) if is_served else None


def _rounds(transfers: Sequence[Sequence[Sequence[Transfer]]], max_elements: int) -> Iterator[range]:
    """Yield the ranks that are served together; nothing if there are no requests."""
    first, sums = 0, [0] * len(transfers)
    for rank, owners in enumerate(transfers):
        sizes = [_elements(part) for part in owners]
        if max(sums) and max(map(sum, zip(sums, sizes, strict=True))) > max_elements:
            yield range(first, rank)
            first, sums = rank, [0] * len(transfers)
        sums = [total + size for total, size in zip(sums, sizes, strict=True)]
    if any(sums):
        yield range(first, len(transfers))


def _assemble(
    ranges: Sequence[RowRange],
    transfers: Sequence[Sequence[Transfer]],
    received: Sequence[torch.Tensor],
    request: RequestedRows,
    device: torch.device,
) -> BucketTensors:
    """Return the rows of this rank's `request`, from the buffers `received` from each owner."""
    rows_of = {part: rows for part in ranges if (rows := part.requested_by(request))}
    targets = {part: part.empty(rows, device) for part, rows in rows_of.items()}
    for from_owner, flat in zip(transfers, received, strict=False):
        for (part, held, rows), values in zip(from_owner, _unpack(flat, from_owner), strict=True):
            held.write(targets[part], rows_of[part].start, rows, values)
    return {key: value for part, rows in rows_of.items() for key, value in part.keyed(rows, targets[part]).items()}


def gather_on_rank0(
    name: str,
    shape: tuple[int, ...],
    copy: ModelCopy,
    shards: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
) -> torch.Tensor | None:
    """Return the full tensor in host memory of rank 0, None elsewhere. A collective of `group` for `copy.ranks`."""
    if 0 not in copy.ranks:
        return None
    part, rank = RowRange(name, shape, dtype, range(shape[0])), dist.get_rank()
    target = part.empty(part.rows, torch.device("cpu")) if rank == 0 else None
    for sender, transfers in zip(copy.ranks, _transfers([part], copy), strict=True):
        if transfers and rank in (0, sender):
            _send_to_rank0(target, sender, transfers, shards, dtype, group)
    return target


def _send_to_rank0(
    target: torch.Tensor | None,
    sender: int,
    transfers: Sequence[Transfer],
    shards: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
) -> None:
    """Copy one rank's part into rank 0's `target`; frees its buffer before the next rank's is allocated."""
    flat = torch.empty(_elements(transfers), dtype=dtype)
    if dist.get_rank() == sender:
        _pack(flat, transfers, shards)
    if target is None:
        dist.send(flat, dst=0, group=group)
        return
    if sender != 0:
        dist.recv(flat, src=sender, group=group)
    for (_, held, rows), values in zip(transfers, _unpack(flat, transfers), strict=True):
        held.write(target, 0, rows, values)


def _transfers(
    ranges: Iterable[RowRange], copy: ModelCopy, request: RequestedRows | None = None
) -> list[list[Transfer]]:
    """Return the requested rows (None: all rows) of the ranges, by owner."""
    transfers: list[list[Transfer]] = [[] for _ in copy.ranks]
    for part in ranges:
        requested = part.rows if request is None else part.requested_by(request)
        for held in copy.held[part.name]:
            if rows := overlap(requested, held.box[0]):
                transfers[held.owner].append((part, held, rows))
    return transfers


def _elements(transfers: Iterable[Transfer]) -> int:
    return sum(len(rows) * held.width for _, held, rows in transfers)


def _unpack(flat: torch.Tensor, transfers: Iterable[Transfer]) -> Sequence[torch.Tensor]:
    """Split a buffer into the values of each transfer."""
    return flat.split([len(rows) * held.width for _, held, rows in transfers])


def _pack(flat: torch.Tensor, transfers: Sequence[Transfer], shards: Mapping[str, torch.Tensor]) -> None:
    """Copy the rows of all transfers into a buffer."""
    for (_, held, rows), place in zip(transfers, _unpack(flat, transfers), strict=True):
        values = held.read(shards, rows)
        place.view(values.shape).copy_(values)
