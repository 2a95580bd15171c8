"""Trainer and rollouts in different processes: trainer rank 0 broadcasts each bucket to all rollouts at once.

The controller calls `send` on every trainer rank and `receive` on every rollout rank at the same time. One header per
bucket says what follows; the last one carries the fingerprints, or the error that ended it, so that no side waits for
the other in vain. Then everyone hears whether all have succeeded. Where a member is lost, the others' call ends in a
TransferLostError: the trainer is as it was, and may send again over a new group.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from verl.types.weights import Bucket, Manifest, TensorSlice, TensorSpec, Wanted, WeightMismatchError
from verl.utils.transfer_group import TransferGroup, TransferLostError
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.bucket_layout import BucketPiece, WholeTensors, bucket_layout, dtype_name, end_of
from verl.workers.sharding_manager.base import (
    DEFAULT_BUCKET_BYTES,
    SentWeights,
    SyncStats,
    UntilError,
    WeightSource,
    all_rows,
)

__all__ = ["BroadcastReceiver", "BroadcastSender"]


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
        manifest, sent = engine.manifest(), SentWeights(self.dtype)
        nothing: Wanted = {}
        wanted = [nothing] * (dist.get_world_size() if dist.is_initialized() else 1)
        wanted[0] = all_rows(manifest)
        buckets = engine.buckets(self.dtype, self.bucket_bytes, wanted)
        if self.group is None:
            for _ in buckets:
                pass  # this rank only gives its part
            return SyncStats(0, 0, time.perf_counter() - start)
        group = self.group
        try:
            group.broadcast_json({"version": version, "dtype": dtype_name(self.dtype), "manifest": _plain(manifest)})
            for bucket in buckets:
                self._send_bucket(group, bucket)
                sent.add(bucket)
        except TransferLostError:
            for _ in buckets:
                pass  # the other training ranks give their part of every bucket, sent or not
            raise
        except Exception as error:
            group.broadcast_json({"error": f"{type(error).__name__}: {error}"})
            group.failed_members(True)
            raise
        group.broadcast_json({"fingerprint": sent.fingerprint})
        refused = group.failed_members(False)
        if refused:
            raise WeightMismatchError(
                f"weights: version {version} was refused by rollout rank(s) {[rank - 1 for rank in refused]};"
                " the error there says which tensor."
            )
        return SyncStats(len(sent.fingerprint), sent.bytes, time.perf_counter() - start)

    def _send_bucket(self, group: TransferGroup, bucket: Bucket) -> None:
        layout = bucket_layout(bucket)
        group.broadcast_json({"tensors": [vars(piece) for piece in layout]})
        flat = torch.zeros(end_of(layout), dtype=torch.uint8, device=group.device)
        for piece in layout:
            piece.view(flat).copy_(bucket[piece.key])
        group.broadcast(flat)


class BroadcastReceiver:
    """A rollout rank's side."""

    def __init__(self, group: TransferGroup) -> None:
        self.group = group

    def receive(self, rollout: BaseRollout) -> SyncStats:
        """Take one version in. After an error of its own it keeps receiving: the others must not wait for it."""
        start = time.perf_counter()
        steps, loader = UntilError(), _Loader(rollout)
        try:
            tensors, size = self._receive(steps, loader)
        except TransferLostError as error:
            steps.error = error
        if steps.error is not None:
            if loader.begun:
                rollout.fail_update(steps.error)
            raise steps.error
        return SyncStats(tensors, size, time.perf_counter() - start)

    def _receive(self, steps: UntilError, loader: _Loader) -> tuple[int, int]:
        """(tensors, bytes) of one version, each step of it by `steps`."""
        size = 0
        steps.run(loader.begin, self.group.broadcast_json())
        while "tensors" in (header := self.group.broadcast_json()):
            layout = [BucketPiece(**piece) for piece in header["tensors"]]
            flat = self.group.broadcast(torch.empty(end_of(layout), dtype=torch.uint8, device=self.group.device))
            steps.run(loader.load, {piece.key: piece.view(flat) for piece in layout})
            size += flat.numel()
        steps.run(loader.finish, header)
        self.group.failed_members(steps.error is not None)
        return len(header.get("fingerprint", ())), size


class _Loader:
    """One version on its way into an engine, which gets of it what it wants."""

    def __init__(self, rollout: BaseRollout) -> None:
        self._rollout, self._wanted = rollout, rollout.wanted()
        self._whole = WholeTensors({})
        self.begun = False

    def begin(self, header: dict[str, Any]) -> None:
        self._raise_senders(header)
        here = dtype_name(self._rollout.weight_dtype)
        if header["dtype"] != here:
            raise WeightMismatchError(
                f"weights: the trainer sends {header['dtype']}, the rollout holds {here}."
                " Both sides take the rollout's dtype; set it (auto depends on the device)."
            )
        specs = header["manifest"]
        manifest = {name: TensorSpec(tuple(shape), getattr(torch, dtype)) for name, shape, dtype in specs}
        self._whole = WholeTensors(manifest)
        self._rollout.begin_update(header["version"], manifest)
        self.begun = True

    def load(self, bucket: Bucket) -> None:
        if self._wanted is None:
            bucket = self._whole.of(bucket)
        else:
            bucket = {key: tensor for key, tensor in bucket.items() if _name(key) in self._wanted}
        self._rollout.load_bucket(bucket)

    def finish(self, header: dict[str, Any]) -> None:
        self._raise_senders(header)
        sent = header["fingerprint"]
        wanted = sent if self._wanted is None else self._wanted
        self._rollout.finish_update({name: total for name, total in sent.items() if name in wanted})

    def _raise_senders(self, header: dict[str, Any]) -> None:
        if "error" in header:
            raise WeightMismatchError(f"weights: the trainer stopped in the middle of sending: {header['error']}")


def _name(key: str | TensorSlice) -> str:
    return key if isinstance(key, str) else key.name


def _plain(manifest: Manifest) -> list[tuple[str, list[int], str]]:
    return [(name, list(spec.shape), dtype_name(spec.dtype)) for name, spec in manifest.items()]
