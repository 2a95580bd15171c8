"""A folder of torch.distributed.checkpoint, as tensors that can be read part by part.

Engines of ours write their weights so, and so does Megatron-Core.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from verl.model_merger.stored import Box, FileTensor, Piece, Stored, assembled
from verl.model_merger.torch_files import read_torch_file
from verl.workers.engine.common.dcp_reader import METADATA, StoredChunk, read_folder

__all__ = ["METADATA", "dcp_tensors"]


def dcp_tensors(folder: Path) -> dict[str, Stored]:
    """By name; what is no tensor is left out."""
    tensors: dict[str, Stored] = {}
    for name, stored in read_folder(folder).items():
        if stored is not None:
            pieces = [
                Piece(chunk.offsets, chunk.shape, _Blob(chunk, stored.dtype), (0,) * len(chunk.shape))
                for chunk in stored.chunks
            ]
            tensors[name] = assembled(f"{folder}: {name}", stored.shape, stored.dtype, pieces)
    return tensors


@dataclass(frozen=True)
class _Blob:
    """A tensor as `torch.save` writes it, somewhere in a file."""

    chunk: StoredChunk
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.chunk.shape

    def read(self, box: Box, target: torch.Tensor) -> None:
        tensor = read_torch_file(self.chunk.path, self.chunk.start, self.chunk.length)
        if isinstance(tensor, FileTensor) and math.prod(tensor.shape) == math.prod(self.shape):
            tensor = replace(tensor, shape=self.shape)  # Core stores one of a stack without the dimension of the stack
        if getattr(tensor, "shape", None) != self.shape:
            raise ValueError(
                f"{self.chunk.path}: at byte {self.chunk.start} there is not what {METADATA} says: it is damaged."
            )
        tensor.read(box, target)
