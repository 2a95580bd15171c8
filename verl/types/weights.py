"""What trainers and rollout engines say about weights, by Hugging Face name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

__all__ = ["Manifest", "TensorSpec", "WeightMismatchError"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one weight."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Manifest: TypeAlias = Mapping[str, TensorSpec]
"""Every weight of the whole model."""


class WeightMismatchError(RuntimeError):
    """The engine's weights are not the trainer's. It generates nothing until an update succeeds."""
