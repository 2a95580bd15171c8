"""Files of `torch.save`, of any version of torch, whose tensors are read part by part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl.model_merger.stored import FileTensor, Stored, StridedTensor
from verl.utils.torch_archive import TensorPlace, read_archive


def read_torch_file(path: Path, start: int = 0, length: int | None = None) -> Any:
    """The object in a file of `torch.save`, or in that part of it; its tensors are `Stored`, its objects `Record`s."""
    return read_archive(path, _stored, start, length)


def _stored(place: TensorPlace) -> Stored:
    if place.contiguous:
        return FileTensor(place.path, place.position, place.shape, place.dtype)
    return StridedTensor(FileTensor(place.path, place.position, (place.span,), place.dtype), place.shape, place.stride)
