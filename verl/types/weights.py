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
"""Rows (entries of the first dimension) of each weight that an engine needs; no others are sent to it."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Key of a bucket: rows `start` to `stop` of a weight."""

    name: str
    start: int
    stop: int


Bucket: TypeAlias = "Mapping[str | TensorSlice, torch.Tensor]"
"""Weights of one transfer: whole tensors by name, rows of tensors by `TensorSlice`."""


class WeightMismatchError(RuntimeError):
    """The engine's weights differ from the trainer's. It refuses requests until an update succeeds."""
