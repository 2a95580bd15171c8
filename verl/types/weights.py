"""What trainers and rollout engines say about weights, by Hugging Face name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

__all__ = ["Bucket", "Manifest", "TensorSlice", "TensorSpec", "Wanted", "WeightMismatchError"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one weight."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Manifest: TypeAlias = Mapping[str, TensorSpec]
"""Every weight of the whole model."""

Wanted: TypeAlias = Mapping[str, range]
"""What one engine takes of the weights: the rows (entries of the first dimension) of each; no others are sent to it."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """The key of rows `start` to `stop` of a weight in a bucket."""

    name: str
    start: int
    stop: int


Bucket: TypeAlias = "Mapping[str | TensorSlice, torch.Tensor]"
"""Weights on their way to an engine: whole under their name, or some rows of one under a `TensorSlice`."""


class WeightMismatchError(RuntimeError):
    """The engine's weights are not the trainer's. It generates nothing until an update succeeds."""
