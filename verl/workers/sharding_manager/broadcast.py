"""Trainer and rollouts in different processes: trainer rank 0 broadcasts each bucket to all rollouts at once.

The controller calls `send` on every trainer rank and `receive` on every rollout rank at the same time. One header per
bucket says what follows; the last one carries the fingerprints, or the error that ended it, so that no side waits for
the other in vain. Then everyone hears whether all have succeeded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verl.types.weights import Manifest, TensorSpec, WeightMismatchError
from verl.utils.weight_fingerprint import fingerprints
from verl.workers.rollout.base import BaseRollout
from verl.workers.sharding_manager.base import DEFAULT_BUCKET_BYTES, SyncStats, WeightSource
from verl.workers.sharding_manager.transfer_group import TransferGroup

__all__ = ["BroadcastReceiver", "BroadcastSender"]

# Tensors of any dtype may start at multiples of this many bytes.
_ALIGNMENT = 16


class BroadcastSender:
    """The trainer's side. Every training rank has one; only rank 0's is a member of the group."""

    def __init__(
        self, group: TransferGroup | None, dtype: torch.dtype, bucket_bytes: int = DEFAULT_BUCKET_BYTES
    ) -> None:
        self.group = group
        self.dtype = dtype
        self.bucket_bytes = bucket_bytes

    def send(self, engine: WeightSource, version: int) -> SyncStats:
        """A collective of all training ranks. Raises on rank 0 when a rollout refused the weights."""
        start = time.perf_counter()
        manifest = engine.manifest()
        if self.group is None:
            sizes = [len(bucket) for bucket in engine.buckets(self.dtype, self.bucket_bytes)]
            return SyncStats(sum(sizes), 0, time.perf_counter() - start)
        group = self.group
        size = 0
        expected: dict[str, int] = {}
        try:
            group.broadcast_json({"version": version, "dtype": _dtype_name(self.dtype), "manifest": _plain(manifest)})
            for bucket in engine.buckets(self.dtype, self.bucket_bytes):
                size += self._send_bucket(group, bucket)
                expected |= fingerprints(bucket, self.dtype)
        except Exception as error:
            group.broadcast_json({"error": f"{type(error).__name__}: {error}"})
            group.failed_members(True)
            raise
        group.broadcast_json({"fingerprint": expected})
        refused = group.failed_members(False)
        if refused:
            raise WeightMismatchError(
                f"weights: version {version} was refused by rollout rank(s) {[rank - 1 for rank in refused]};"
                " the error there says which tensor."
            )
        return SyncStats(len(expected), size, time.perf_counter() - start)

    def _send_bucket(self, group: TransferGroup, bucket: Mapping[str, torch.Tensor]) -> int:
        layout = _layout(bucket)
        group.broadcast_json({"tensors": [vars(piece) for piece in layout]})
        flat = torch.zeros(_end(layout), dtype=torch.uint8, device=group.device)
        for piece in layout:
            piece.view(flat).copy_(bucket[piece.name])
        group.broadcast(flat)
        return flat.numel()


class BroadcastReceiver:
    """A rollout rank's side."""

    def __init__(self, group: TransferGroup) -> None:
        self.group = group

    def receive(self, rollout: BaseRollout) -> SyncStats:
        """Take one version in. After an error of its own it keeps receiving: the others must not wait for it."""
        start = time.perf_counter()
        steps = _UntilError()
        tensors = size = 0
        steps.run(_begin, rollout, self.group.broadcast_json())
        while "tensors" in (header := self.group.broadcast_json()):
            layout = [_Piece(**piece) for piece in header["tensors"]]
            flat = self.group.broadcast(torch.empty(_end(layout), dtype=torch.uint8, device=self.group.device))
            steps.run(rollout.load_bucket, {piece.name: piece.view(flat) for piece in layout})
            tensors, size = tensors + len(layout), size + flat.numel()
        steps.run(_finish, rollout, header)
        self.group.failed_members(steps.error is not None)
        if steps.error is not None:
            raise steps.error
        return SyncStats(tensors, size, time.perf_counter() - start)


class _UntilError:
    """Runs steps until one fails, then skips the rest."""

    error: Exception | None = None

    def run(self, step: Callable[..., None], *args: Any) -> None:
        if self.error is None:
            try:
                step(*args)
            except Exception as error:  # noqa: BLE001 - raised when the transfer has been drained
                self.error = error


@dataclass(frozen=True)
class _Piece:
    """A tensor's place in a bucket's bytes."""

    name: str
    shape: list[int]
    dtype: str
    start: int

    @property
    def size(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.start : self.start + self.size].view(getattr(torch, self.dtype)).view(self.shape)


def _begin(rollout: BaseRollout, header: dict[str, Any]) -> None:
    if "error" in header:
        _finish(rollout, header)
    if header["dtype"] != _dtype_name(rollout.weight_dtype):
        raise WeightMismatchError(
            f"weights: the trainer sends {header['dtype']}, the rollout holds {_dtype_name(rollout.weight_dtype)}."
            " Both sides take the rollout's dtype; set it (auto depends on the device)."
        )
    manifest = {name: TensorSpec(tuple(shape), getattr(torch, dtype)) for name, shape, dtype in header["manifest"]}
    rollout.begin_update(header["version"], manifest)


def _finish(rollout: BaseRollout, header: dict[str, Any]) -> None:
    if "error" in header:
        raise WeightMismatchError(f"weights: the trainer stopped in the middle of sending: {header['error']}")
    rollout.finish_update(header["fingerprint"])


def _layout(bucket: Mapping[str, torch.Tensor]) -> list[_Piece]:
    pieces: list[_Piece] = []
    for name, tensor in bucket.items():
        start = -(-_end(pieces) // _ALIGNMENT) * _ALIGNMENT
        pieces.append(_Piece(name, list(tensor.shape), _dtype_name(tensor.dtype), start))
    return pieces


def _end(pieces: Sequence[_Piece]) -> int:
    return pieces[-1].start + pieces[-1].size if pieces else 0


def _plain(manifest: Manifest) -> list[tuple[str, list[int], str]]:
    return [(name, list(spec.shape), _dtype_name(spec.dtype)) for name, spec in manifest.items()]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
