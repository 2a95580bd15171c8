"""Types of the weight sync from trainer to rollout engines. Weights have their Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

__all__ = ["Bucket", "Manifest", "RequestedRows", "TensorSlice", "TensorSpec", "WeightMismatchError"]


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
