"""What a hand-over needs of the trainer, and what it tells afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from verl.types.weights import Manifest

__all__ = ["DEFAULT_BUCKET_BYTES", "SyncStats", "WeightSource"]

# Large enough that a bucket's fixed costs vanish, small enough beside a model shard.
DEFAULT_BUCKET_BYTES = 512 * 1024**2


class WeightSource(Protocol):
    """The part of a TrainEngine that a hand-over uses. Both are collectives of the training ranks."""

    def manifest(self) -> Manifest: ...

    def buckets(self, dtype: torch.dtype | None, max_bytes: int) -> Iterator[dict[str, torch.Tensor]]: ...


@dataclass(frozen=True)
class SyncStats:
    """One hand-over in numbers."""

    tensors: int
    bytes: int
    seconds: float
