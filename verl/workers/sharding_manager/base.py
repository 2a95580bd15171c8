"""What a hand-over needs of the trainer, what goes along with the weights, and what it tells afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from verl.types.weights import Bucket, Manifest, TensorSlice, Wanted
from verl.utils.weight_fingerprint import Place, fingerprints

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "SentWeights",
    "SyncStats",
    "UntilError",
    "WeightSource",
    "all_rows",
    "wanted_by_rank",
]


# Large enough that a bucket's fixed costs vanish, small enough beside a model shard.
DEFAULT_BUCKET_BYTES = 512 * 1024**2


class WeightSource(Protocol):
    """The part of a TrainEngine that a hand-over uses. Both are collectives of the training ranks."""

    def manifest(self) -> Manifest: ...

    def buckets(
        self, dtype: torch.dtype | None, max_bytes: int, wanted: Sequence[Wanted] | None = None
    ) -> Iterator[Bucket]: ...


@dataclass(frozen=True)
class SyncStats:
    """One hand-over in numbers."""

    tensors: int
    bytes: int
    seconds: float


@dataclass
class SentWeights:
    """What has been handed over so far: the fingerprint of each weight, rows added up, and the bytes of all."""

    dtype: torch.dtype
    fingerprint: dict[str, int] = field(default_factory=dict)
    bytes: int = 0

    def add(self, bucket: Bucket) -> None:
        """One more bucket."""
        slices = {key: tensor for key, tensor in bucket.items() if isinstance(key, TensorSlice)}
        places: dict[str | TensorSlice, Place]
        places = {key: Place.of_part(tensor.shape, 0, key.start, 0) for key, tensor in slices.items()}
        for key, found in fingerprints(bucket, self.dtype, places).items():
            name = key.name if isinstance(key, TensorSlice) else key
            total = self.fingerprint.get(name, 0) + found
            self.fingerprint[name] = (total + 2**63) % 2**64 - 2**63  # as 64-bit sums of a device wrap
        self.bytes += sum(tensor.nbytes for tensor in bucket.values())


class UntilError:
    """Runs steps until one fails, then skips the rest: those of others go on, who would wait for this rank."""

    error: Exception | None = None

    def run(self, step: Callable[..., None], *args: Any) -> None:
        if self.error is None:
            try:
                step(*args)
            except Exception as error:  # noqa: BLE001 - raised when the transfer has been drained
                self.error = error


def wanted_by_rank(mine: Wanted | None, manifest: Callable[[], Manifest]) -> list[Wanted] | None:
    """What the engine beside each training rank takes; None where all take everything. A collective."""
    everyone: list[Wanted | None] = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    if all(each is None for each in everyone):
        return None
    # Equal ones as one object: trainers look at each kind once.
    kinds: list[Wanted] = []
    found: list[Wanted] = []
    for each in everyone:
        rows = all_rows(manifest()) if each is None else each
        same = next((kind for kind in kinds if kind == rows), None)
        kinds += [rows] if same is None else []
        found.append(rows if same is None else same)
    return found


def all_rows(manifest: Manifest) -> Wanted:
    """What an engine takes that takes everything."""
    return {name: range(spec.shape[0] if spec.shape else 1) for name, spec in manifest.items()}
