"""Weight sync: copy trained weights to rollout engines, in buckets of HF-named tensors, versioned and verified."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from verl.types.weights import (
    Bucket,
    Manifest,
    RequestedRows,
    TensorSlice,
    TensorSpec,
    WeightMismatchError,
    WeightsRefusedError,
)
from verl.utils.transfer_group import TransferGroup, TransferLostError
from verl.utils.weight_fingerprint import Placement, fingerprints
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.weights import BucketPiece, TensorAssembler, bucket_layout, dtype_name, layout_bytes

logger = logging.getLogger(__name__)

# Large enough to make the fixed costs of a bucket negligible, small compared with a model shard.
DEFAULT_BUCKET_BYTES = 512 * 1024**2


class InProcessTransfer:
    """Copies a training engine's weights, or the requested rows of them, to the rollout engine of the same process."""

    def __init__(self, engine: WeightSource, rollout: BaseRollout, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        """A collective of all training ranks, each with the rollout of its own process."""
        self._source, self._rollout, self._bucket_bytes = weight_source(engine, rollout), rollout, bucket_bytes
        self._requested_rows = self._gather_requests()

    def _gather_requests(self) -> list[RequestedRows] | None:
        return requests_of_ranks(self._rollout.requested_rows(), self._source.manifest)

    def sync(self, version: int) -> SyncStats:
        """Copy the weights and verify them; WeightMismatchError if the rollout's differ afterwards.

        A collective: a rank whose rollout engine fails still provides its part of every bucket to the others.
        """
        rollout, manifest = self._rollout, self._source.manifest()
        if rollout.applies_adapters:
            self._requested_rows = self._gather_requests()  # frozen weights are requested until they are verified
        sent, steps, assembler = SentWeights(rollout.weight_dtype), StepsUntilError(), TensorAssembler(manifest)
        accepts_rows = rollout.requested_rows() is not None
        steps.run(rollout.begin_update, version, manifest)
        begun = steps.error is None
        if steps.error is not None and not (dist.is_initialized() and dist.get_world_size() > 1):
            raise steps.error
        try:
            for bucket in self._source.buckets(rollout.weight_dtype, self._bucket_bytes, self._requested_rows):
                steps.run(rollout.load_bucket, bucket if accepts_rows else assembler.add(bucket))
                steps.run(sent.add, bucket)
        except Exception as error:
            error = _with_cause(error, steps.error)
            if begun:
                rollout.fail_update(error)
            raise error
        if steps.error is not None:
            rollout.exchange_error(steps.error)
            if begun:
                rollout.fail_update(steps.error)
            raise steps.error
        rollout.finish_update(sent.fingerprint)
        return SyncStats(len(sent.fingerprint), sent.bytes)


class BroadcastSender:
    """The trainer's side of a weight sync between processes. Only training rank 0 is a member of the group.

    The controller calls `send` on every trainer rank and `receive` on every rollout rank at the same time. Rank 0
    broadcasts a header before each bucket; the last header contains the fingerprints, or the error that ended the
    transfer, so that no side waits for further data. Then all members exchange whether they have succeeded. If a member
    is lost, the calls of the others raise TransferLostError; the trainer is unchanged and may send again over a new
    group.
    """

    def __init__(
        self, group: TransferGroup | None, dtype: torch.dtype, bucket_bytes: int = DEFAULT_BUCKET_BYTES
    ) -> None:
        self.group = group
        self.dtype = dtype
        self.bucket_bytes = bucket_bytes

    def send(self, engine: WeightSource, version: int) -> SyncStats:
        """Send one version. A collective of all training ranks; raises on rank 0 if a rollout refused the weights."""
        manifest, sent, lost = engine.manifest(), SentWeights(self.dtype), None
        try:
            names = self._begin(engine, version, manifest)
        except TransferLostError as error:
            names, lost = frozenset(manifest), error
        buckets = engine.buckets(self.dtype, self.bucket_bytes, self._requests(manifest, names))
        if self.group is None:
            for _ in buckets:
                pass  # this rank only takes part in gathering
            return SyncStats(0, 0)
        group = self.group
        try:
            if lost is not None:
                raise lost
            for bucket in buckets:
                self._send_bucket(group, bucket)
                sent.add(bucket)
        except TransferLostError:
            for _ in buckets:
                pass  # the other training ranks gather all buckets, sent or not
            raise
        except Exception as error:
            with suppress(TransferLostError):  # the trainer's own error is the cause
                group.broadcast_json({"error": f"{type(error).__name__}: {error}"})
                group.members_with_flag(True)
            try:
                for _ in buckets:
                    pass  # as above; nothing is left if gathering itself has failed
            except Exception as later:  # noqa: BLE001 - the first error is raised
                logger.warning("weights: after the first error, gathering the remaining buckets failed: %s", later)
            raise
        group.broadcast_json({"fingerprint": sent.fingerprint})
        refused = group.members_with_flag(False)
        if refused:
            raise WeightsRefusedError(
                f"weights: version {version} was refused by rollout rank(s) {[rank - 1 for rank in refused]};"
                " the error there names the tensor."
            )
        return SyncStats(len(sent.fingerprint), sent.bytes)

    def _begin(self, engine: WeightSource, version: int, manifest: Manifest) -> frozenset[str]:
        """Announce the version; return the names of the weights to send: only those that training changes, if every
        receiver has verified the others. A collective of all training ranks."""
        frozen_missing = [True]
        trained: frozenset[str] | None = getattr(engine, "trained_names", None)
        try:
            if self.group is not None:
                header = {"version": version, "dtype": dtype_name(self.dtype), "manifest": _manifest_json(manifest)}
                self.group.broadcast_json(header | {"trained": None if trained is None else sorted(trained)})
                if trained is not None:  # receivers set their flag if they still request frozen weights
                    frozen_missing = [bool(self.group.members_with_flag(False))]
        finally:
            if trained is not None and dist.is_initialized() and dist.get_world_size() > 1:
                dist.broadcast_object_list(frozen_missing, src=0)
        return frozenset(manifest) if trained is None or frozen_missing[0] else trained

    def _requests(self, manifest: Manifest, names: frozenset[str]) -> list[RequestedRows]:
        """Return the rows that each training rank receives: all rows of the weights `names` on rank 0, which sends
        them; none on other ranks."""
        no_rows: RequestedRows = {}
        requested = [no_rows] * (dist.get_world_size() if dist.is_initialized() else 1)
        requested[0] = {name: rows for name, rows in all_rows(manifest).items() if name in names}
        return requested

    def _send_bucket(self, group: TransferGroup, bucket: Bucket) -> None:
        layout = bucket_layout(bucket)
        flat = torch.zeros(layout_bytes(layout), dtype=torch.uint8, device=group.device)
        for piece in layout:
            piece.view(flat).copy_(bucket[piece.key])
        # After this header the members expect the tensors: what may fail comes before.
        group.broadcast_json({"tensors": [vars(piece) for piece in layout]})
        group.broadcast(flat)


class BroadcastReceiver:
    """A rollout rank's side of a weight sync between processes."""

    def __init__(self, group: TransferGroup) -> None:
        self.group = group

    def receive(self, rollout: BaseRollout) -> SyncStats:
        """Receive one version. If a load fails, the remaining buckets are received and dropped. If this rank cannot
        receive them, it leaves the group, so that no member waits for it.

        An error on one of the ranks that share an engine, such as a lost connection, is raised on all of them; with
        NCCL only after each of them has aborted the group.
        """
        steps, loader = StepsUntilError(), _Loader(rollout)
        try:
            tensors, size = self._receive(steps, loader)
        except Exception as error:  # noqa: BLE001 - raised below; too little memory on this rank, for example
            self.group.leave()
            steps.error = _with_cause(error, steps.error)
            # With NCCL the peers may still be in a broadcast, so that this rank must not wait for them.
            if self.group.ends_when_left:
                loader.raise_on_peers(steps.error)
        if steps.error is not None:
            if loader.begun:
                rollout.fail_update(steps.error)
            raise steps.error
        return SyncStats(tensors, size)

    def _receive(self, steps: StepsUntilError, loader: _Loader) -> tuple[int, int]:
        """Receive one version, executing each load by `steps`; return (number of tensors, bytes)."""
        size = 0
        first = self.group.broadcast_json()
        if first.get("trained") is not None:
            self.group.members_with_flag(loader.requests_others(first["trained"]))
        steps.run(loader.begin, first)
        while "tensors" in (header := self.group.broadcast_json()):
            layout = [BucketPiece(**piece) for piece in header["tensors"]]
            flat = self.group.broadcast(torch.empty(layout_bytes(layout), dtype=torch.uint8, device=self.group.device))
            steps.run(loader.load, {piece.key: piece.view(flat) for piece in layout})
            size += flat.numel()
        steps.run(_raise_sender_error, header)
        if steps.error is not None:
            loader.raise_on_peers(steps.error)
        steps.run(loader.finish, header)
        self.group.members_with_flag(steps.error is not None)
        return len(header.get("fingerprint", ())), size


class _Loader:
    """Loads the requested weights of one version into an engine.

    The ranks that share the engine exchange their errors twice: before the update begins, which waits for all of them,
    and at its end.
    """

    def __init__(self, rollout: BaseRollout) -> None:
        self._rollout, self._requested_rows = rollout, rollout.requested_rows()
        self._assembler = TensorAssembler({})
        self._error_is_known = False
        """Whether no further exchange follows: it has taken place, or the peers have raised an error before."""
        self.begun = False

    def requests_others(self, trained: Sequence[str]) -> bool:
        """Return whether the engine requests weights that are not in `trained`."""
        return self._requested_rows is None or not self._requested_rows.keys() <= set(trained)

    def begin(self, header: dict[str, Any]) -> None:
        check = StepsUntilError()
        check.run(self._check_header, header)
        self._error_is_known = True  # also if the exchange itself fails
        if (error := self._rollout.exchange_error(check.error)) is not None:
            raise error
        self._error_is_known = False
        specs = header["manifest"]
        manifest = {name: TensorSpec(tuple(shape), getattr(torch, dtype)) for name, shape, dtype in specs}
        self._assembler = TensorAssembler(manifest)
        self._rollout.begin_update(header["version"], manifest)
        self.begun = True

    def load(self, bucket: Bucket) -> None:
        if self._requested_rows is None:
            bucket = self._assembler.add(bucket)
        else:
            bucket = {key: tensor for key, tensor in bucket.items() if _weight_name(key) in self._requested_rows}
        self._rollout.load_bucket(bucket)

    def finish(self, header: dict[str, Any]) -> None:
        sent = header["fingerprint"]
        names = sent if self._requested_rows is None else self._requested_rows
        self._error_is_known = True
        self._rollout.finish_update({name: total for name, total in sent.items() if name in names})

    def raise_on_peers(self, error: Exception) -> None:
        """Take part in the next exchange of the ranks that share the engine with this error, unless they know it."""
        if self._error_is_known:
            return
        self._error_is_known = True
        try:
            self._rollout.exchange_error(error)
        except Exception as unsent:  # noqa: BLE001 - a peer has died or does not respond; the caller raises `error`
            logger.warning(
                "weights: this rank has failed (%s), and the other ranks of its engine could not be informed: %s",
                error,
                unsent,
            )

    def _check_header(self, header: dict[str, Any]) -> None:
        _raise_sender_error(header)
        dtype = dtype_name(self._rollout.weight_dtype)
        if header["dtype"] != dtype:
            raise WeightMismatchError(
                f"weights: the trainer sends {header['dtype']}, but the rollout has {dtype}. Set rollout.dtype"
                " explicitly (auto depends on the device)."
            )


def _raise_sender_error(header: dict[str, Any]) -> None:
    if "error" in header:
        raise WeightMismatchError(f"weights: the trainer failed while sending: {header['error']}")


def _with_cause(error: Exception, earlier: Exception | None) -> Exception:
    """Return the error of a sync; a lost connection is often the consequence of an `earlier` error, such as a CUDA
    error while loading."""
    if earlier is None:
        return error
    if not isinstance(error, TransferLostError):
        logger.warning("weights: after its first error, this rank failed to get the remaining buckets, too: %s", error)
        return earlier
    lost = TransferLostError(f"{error} Before, this rank had failed: {type(earlier).__name__}: {earlier}")
    lost.__cause__ = earlier
    return lost


def _weight_name(key: str | TensorSlice) -> str:
    return key if isinstance(key, str) else key.name


def _manifest_json(manifest: Manifest) -> list[tuple[str, list[int], str]]:
    """Return (name, shape, dtype) of every weight, for a JSON header."""
    return [(name, list(spec.shape), dtype_name(spec.dtype)) for name, spec in manifest.items()]


class WeightSource(Protocol):
    """The part of a TrainEngine that a weight sync uses. Both methods are collectives of the training ranks."""

    def manifest(self) -> Manifest: ...

    def buckets(
        self, dtype: torch.dtype | None, max_bytes: int, requested: Sequence[RequestedRows] | None = None
    ) -> Iterator[Bucket]: ...


def weight_source(engine: Any, rollout: BaseRollout) -> WeightSource:
    """Return the weights of a training engine as this rollout receives them: LoRA adapters merged or separate."""
    unmerged = engine.unmerged() if rollout.applies_adapters else None
    return engine if unmerged is None else unmerged


@dataclass(frozen=True)
class SyncStats:
    """Statistics of one weight sync."""

    tensors: int
    bytes: int


@dataclass
class SentWeights:
    """Fingerprint of each weight sent so far, summed over rows, and the total bytes."""

    dtype: torch.dtype
    fingerprint: dict[str, int] = field(default_factory=dict)
    bytes: int = 0

    def add(self, bucket: Bucket) -> None:
        """Add a bucket."""
        slices = {key: tensor for key, tensor in bucket.items() if isinstance(key, TensorSlice)}
        places: dict[str | TensorSlice, Placement]
        places = {key: Placement.of_shard(tensor.shape, 0, key.start, 0) for key, tensor in slices.items()}
        for key, value in fingerprints(bucket, self.dtype, places).items():
            name = _weight_name(key)
            total = self.fingerprint.get(name, 0) + value
            self.fingerprint[name] = (total + 2**63) % 2**64 - 2**63  # wraps like 64-bit sums on a device
        self.bytes += sum(tensor.nbytes for tensor in bucket.values())


class StepsUntilError:
    """Runs steps until one fails, and skips later steps, so that collectives with other ranks can be completed."""

    error: Exception | None = None

    def run(self, step: Callable[..., None], *args: Any) -> None:
        if self.error is None:
            try:
                step(*args)
            except Exception as error:  # noqa: BLE001 - raised after the remaining buckets are consumed
                self.error = error


def requests_of_ranks(own: RequestedRows | None, manifest: Callable[[], Manifest]) -> list[RequestedRows] | None:
    """Return the requests of the rollouts of all training ranks; None if all request everything. A collective."""
    requests: list[RequestedRows | None] = [own]
    if dist.is_initialized() and dist.get_world_size() > 1:
        requests = [None] * dist.get_world_size()
        dist.all_gather_object(requests, own)
    if all(request is None for request in requests):
        return None
    # Equal requests share one object, so that engines process each distinct request once.
    distinct: list[RequestedRows] = []
    result: list[RequestedRows] = []
    for request in requests:
        rows = all_rows(manifest()) if request is None else request
        equal = next((other for other in distinct if other == rows), None)
        distinct += [rows] if equal is None else []
        result.append(rows if equal is None else equal)
    return result


def all_rows(manifest: Manifest) -> RequestedRows:
    """Return a request of all rows of all weights."""
    return {name: range(spec.shape[0] if spec.shape else 1) for name, spec in manifest.items()}
