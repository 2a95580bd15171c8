"""Weight sync: copy trained weights to rollout engines in the same process or in other processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from verl.types.weights import Bucket, Manifest, TensorSlice, TensorSpec, Wanted, WeightMismatchError
from verl.utils.transfer_group import TransferGroup, TransferLostError
from verl.utils.weight_fingerprint import Placement, fingerprints
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.weights import BucketPiece, WholeTensors, bucket_layout, dtype_name, layout_bytes

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "BroadcastReceiver",
    "BroadcastSender",
    "InProcessTransfer",
    "SentWeights",
    "SyncStats",
    "UntilError",
    "WeightSource",
    "all_rows",
    "wanted_by_rank",
]


# Large enough that a bucket's fixed costs vanish, small enough beside a model shard.
DEFAULT_BUCKET_BYTES = 512 * 1024**2


class InProcessTransfer:
    """Hands a training engine's weights to the rollout of the same process: what that wants, and no more."""

    def __init__(self, engine: WeightSource, rollout: BaseRollout, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        """A collective: every training rank makes one, with the rollout of its own process."""
        self._engine, self._rollout, self._bucket_bytes = engine, rollout, bucket_bytes
        self._wanted = wanted_by_rank(rollout.wanted(), engine.manifest)

    def sync(self, version: int) -> SyncStats:
        """After this the rollout generates with exactly the trainer's weights, or it raises WeightMismatchError.

        A collective, also where the engine of one rank fails: the others need that rank's part of every bucket.
        """
        start = time.perf_counter()
        rollout, manifest = self._rollout, self._engine.manifest()
        sent, steps, whole = SentWeights(rollout.weight_dtype), UntilError(), WholeTensors(manifest)
        rows_too = rollout.wanted() is not None
        steps.run(rollout.begin_update, version, manifest)
        begun = steps.error is None
        if steps.error is not None and not (dist.is_initialized() and dist.get_world_size() > 1):
            raise steps.error
        try:
            for bucket in self._engine.buckets(rollout.weight_dtype, self._bucket_bytes, self._wanted):
                steps.run(rollout.load_bucket, bucket if rows_too else whole.add(bucket))
                steps.run(sent.add, bucket)
        except Exception as error:
            if begun:
                rollout.fail_update(error)
            raise
        if steps.error is not None:
            if begun:
                rollout.fail_update(steps.error)
            raise steps.error
        rollout.finish_update(sent.fingerprint)
        return SyncStats(len(sent.fingerprint), sent.bytes, time.perf_counter() - start)


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
        flat = torch.zeros(layout_bytes(layout), dtype=torch.uint8, device=group.device)
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
            flat = self.group.broadcast(torch.empty(layout_bytes(layout), dtype=torch.uint8, device=self.group.device))
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
            bucket = self._whole.add(bucket)
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
        places: dict[str | TensorSlice, Placement]
        places = {key: Placement.of_shard(tensor.shape, 0, key.start, 0) for key, tensor in slices.items()}
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
