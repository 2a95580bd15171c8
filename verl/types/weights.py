"""Types of the weight sync from trainer to rollout engines, and how it is divided into buckets and rows.

Weights have their Hugging Face names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one weight."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Manifest: TypeAlias = Mapping[str, TensorSpec]
"""Shape and dtype of every weight of the full model."""

RequestedRows: TypeAlias = Mapping[str, range]
"""Rows (of dimension 0) of each weight that an engine needs; only these are sent."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Key of a bucket: rows [start, stop) of a weight."""

    name: str
    start: int
    stop: int


Bucket: TypeAlias = "Mapping[str | TensorSlice, torch.Tensor]"
"""Weights of one transfer: whole tensors by name, rows of tensors by `TensorSlice`."""


class WeightMismatchError(RuntimeError):
    """The engine's weights differ from the trainer's. The engine rejects requests until a weight sync succeeds."""


class WeightsRefusedError(WeightMismatchError):
    """Raised by the sender: receivers could not load or verify the weights. Their errors are the cause."""


BucketTensors: TypeAlias = "dict[str | TensorSlice, torch.Tensor]"
"""A `Bucket` under construction."""
_Item = TypeVar("_Item")


def bucketed(items: Iterable[tuple[_Item, int]], max_size: int) -> Iterator[list[_Item]]:
    """Yield lists of items, given with their sizes, of at most `max_size` in total; a larger item is yielded alone."""
    if max_size < 1:
        raise ValueError(
            f"bucket size: {max_size} is less than 1 byte. Use the size of a transfer buffer, e.g. 512 MB."
        )
    bucket: list[_Item] = []
    filled = 0
    for item, size in items:
        if bucket and filled + size > max_size:
            yield bucket
            bucket, filled = [], 0
        bucket.append(item)
        filled += size
    if bucket:
        yield bucket


def bucket_key(name: str, rows: range, total_rows: int) -> str | TensorSlice:
    """Return the key of some rows of a weight in a bucket: its name if these are all rows."""
    return name if len(rows) == total_rows else TensorSlice(name, rows.start, rows.stop)


def overlap(one: range, other: range) -> range:
    """Return the intersection of two ranges."""
    return range(max(one.start, other.start), min(one.stop, other.stop))


def distinct_requests(requested: Sequence[RequestedRows] | None) -> list[RequestedRows]:
    """Return the requests of all ranks without duplicates. Ranks with equal requests share one object."""
    return list({id(request): request for request in requested or ()}.values())
