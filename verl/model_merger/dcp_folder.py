"""A folder of torch.distributed.checkpoint: what its `.metadata` says, as tensors that can be read.

Engines of ours write their weights so, and so does Megatron-Core.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from verl.model_merger.stored import Box, FileTensor, Piece, Stored, assembled
from verl.model_merger.torch_files import Opaque, read_pickle, read_torch_file

METADATA = ".metadata"


def dcp_tensors(folder: Path) -> dict[str, Stored]:
    """By name; what is no tensor is left out."""
    fields = read_pickle(folder / METADATA).fields
    places: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {
        (index.fields["fqn"], tuple(index.fields.get("offset") or ())): info.fields
        for index, info in fields["storage_data"].items()
    }
    found: dict[str, Stored] = {}
    for name, entry in fields["state_dict_metadata"].items():
        if not (isinstance(entry, Opaque) and entry.kind.endswith(".TensorStorageMetadata")):
            continue
        dtype, pieces = _dtype(entry.fields["properties"]), []
        for chunk in entry.fields["chunks"]:
            at, shape = tuple(chunk.fields["offsets"]), tuple(chunk.fields["sizes"])
            blob = _blob(folder, f"{folder}: {name}", places.get((name, at)), shape, dtype)
            pieces.append(Piece(at, shape, blob, tuple(0 for _ in shape)))
        found[name] = assembled(f"{folder}: {name}", tuple(entry.fields["size"]), dtype, pieces)
    return found


@dataclass(frozen=True)
class _Blob:
    """A tensor as `torch.save` writes it, somewhere in a file."""

    path: Path
    start: int
    length: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, box: Box, target: torch.Tensor) -> None:
        tensor = read_torch_file(self.path, self.start, self.length)
        if isinstance(tensor, FileTensor) and math.prod(tensor.shape) == math.prod(self.shape):
            tensor = replace(tensor, shape=self.shape)  # Core stores one of a stack without the dimension of the stack
        if getattr(tensor, "shape", None) != self.shape:
            raise ValueError(f"{self.path}: at byte {self.start} there is not what .metadata says: it is damaged.")
        tensor.read(box, target)


def _blob(folder: Path, where: str, place: dict[str, Any] | None, shape: tuple[int, ...], dtype: torch.dtype) -> _Blob:
    if place is None:
        raise ValueError(f"{where}: .metadata does not say in which file a part of it is. The checkpoint is damaged.")
    if place.get("transform_descriptors"):
        raise ValueError(
            f"{where}: it is stored compressed ({place['transform_descriptors']}), which is not read here."
        )
    return _Blob(folder / place["relative_path"], place["offset"], place["length"], shape, dtype)


def _dtype(properties: Opaque) -> torch.dtype:
    found = properties.fields.get("dtype") or (properties.state or (None,))[0]
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{METADATA}: a tensor has no dtype: it is damaged.")
    return found
