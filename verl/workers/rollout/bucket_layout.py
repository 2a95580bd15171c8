"""A bucket of weights as plain bytes: where each tensor lies in them, and rows put together to whole tensors again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from verl.types.weights import Bucket, Manifest, TensorSlice

__all__ = ["BucketPiece", "WholeTensors", "bucket_layout", "dtype_name", "end_of"]

# Tensors of any dtype may start at multiples of this many bytes.
_ALIGNMENT = 16


@dataclass(frozen=True)
class BucketPiece:
    """A tensor's place in a bucket's bytes; of rows of one also the first of them."""

    name: str
    first_row: int | None
    shape: list[int]
    dtype: str
    start: int

    @property
    def key(self) -> str | TensorSlice:
        row = self.first_row
        return self.name if row is None else TensorSlice(self.name, row, row + self.shape[0])

    @property
    def size(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor over its place in the bytes `flat`."""
        return flat[self.start : self.start + self.size].view(getattr(torch, self.dtype)).view(self.shape)


def bucket_layout(bucket: Bucket, start: int = 0) -> list[BucketPiece]:
    """Places for all of a bucket, one behind the other, from byte `start` on."""
    pieces: list[BucketPiece] = []
    for key, tensor in bucket.items():
        start = -(-max(start, end_of(pieces)) // _ALIGNMENT) * _ALIGNMENT
        name, row = (key, None) if isinstance(key, str) else (key.name, key.start)
        pieces.append(BucketPiece(name, row, list(tensor.shape), dtype_name(tensor.dtype), start))
    return pieces


def end_of(pieces: Sequence[BucketPiece]) -> int:
    """Bytes that the bucket takes."""
    return pieces[-1].start + pieces[-1].size if pieces else 0


def dtype_name(dtype: torch.dtype) -> str:
    """As it is found in `torch`."""
    return str(dtype).removeprefix("torch.")


class WholeTensors:
    """For an engine that takes whole tensors only: rows stay here until all of their tensor have come."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._waiting: dict[str, tuple[torch.Tensor, int]] = {}  # and how many are missing

    def of(self, bucket: Bucket) -> Bucket:
        """The tensors that are whole with this bucket."""
        found: dict[str | TensorSlice, torch.Tensor] = {}
        for key, tensor in bucket.items():
            if isinstance(key, str):
                found[key] = tensor
                continue
            rows = self._manifest[key.name].shape[0]
            if key.name not in self._waiting:
                self._waiting[key.name] = tensor.new_empty(rows, *tensor.shape[1:]), rows
            whole, missing = self._waiting.pop(key.name)
            whole[key.start : key.stop] = tensor
            if missing > len(tensor):
                self._waiting[key.name] = whole, missing - len(tensor)
            else:
                found[key.name] = whole
        return found
