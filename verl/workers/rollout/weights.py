"""Weight updates of rollout engines: layout of buckets, assembly of whole tensors, updates of third-party engines."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from verl.types.weights import Bucket, Manifest, RequestedRows, TensorSlice, WeightMismatchError
from verl.utils.weight_fingerprint import fingerprints

# Tensors of any dtype may start at multiples of this many bytes.
_ALIGNMENT = 16


@dataclass(frozen=True)
class BucketPiece:
    """The position of a tensor, or of rows of a tensor, in the bytes of a bucket."""

    name: str
    first_row: int | None
    """The first row; None: the whole tensor."""
    shape: list[int]
    dtype: str
    start: int
    """First byte."""

    @property
    def key(self) -> str | TensorSlice:
        row = self.first_row
        return self.name if row is None else TensorSlice(self.name, row, row + self.shape[0])

    @property
    def size(self) -> int:
        """Number of bytes."""
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor as a view of the bucket's bytes `flat`."""
        return flat[self.start : self.start + self.size].view(getattr(torch, self.dtype)).view(self.shape)


def bucket_layout(bucket: Bucket, start: int = 0) -> list[BucketPiece]:
    """Consecutive, aligned positions of all tensors of a bucket, from byte `start` on."""
    pieces: list[BucketPiece] = []
    for key, tensor in bucket.items():
        start = -(-max(start, layout_bytes(pieces)) // _ALIGNMENT) * _ALIGNMENT
        name, row = (key, None) if isinstance(key, str) else (key.name, key.start)
        pieces.append(BucketPiece(name, row, list(tensor.shape), dtype_name(tensor.dtype), start))
    return pieces


def layout_bytes(pieces: Sequence[BucketPiece]) -> int:
    """The number of bytes of a bucket with this layout."""
    return pieces[-1].start + pieces[-1].size if pieces else 0


def dtype_name(dtype: torch.dtype) -> str:
    """The name of the dtype as an attribute of `torch`."""
    return str(dtype).removeprefix("torch.")


class TensorAssembler:
    """Assembles whole tensors from their rows, for engines that only load whole tensors."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._incomplete: dict[str, tuple[torch.Tensor, int]] = {}
        """By name: the tensor, and the number of its missing rows."""

    def add(self, bucket: Bucket) -> Bucket:
        """Add a bucket; return the tensors that are complete now."""
        complete: dict[str | TensorSlice, torch.Tensor] = {}
        for key, tensor in bucket.items():
            if isinstance(key, str):
                complete[key] = tensor
                continue
            rows = self._manifest[key.name].shape[0]
            if key.name not in self._incomplete:
                self._incomplete[key.name] = tensor.new_empty(rows, *tensor.shape[1:]), rows
            whole, missing = self._incomplete.pop(key.name)
            whole[key.start : key.stop] = tensor
            if missing > len(tensor):
                self._incomplete[key.name] = whole, missing - len(tensor)
            else:
                complete[key.name] = whole
        return complete


class CheckpointWeights(ABC):
    """Base class of the `WeightStore`s of third-party engines, which load whole tensors by their names in a checkpoint.

    These engines merge, split and repack weights, so their tensors cannot be compared with the trainer's. Instead, the
    received tensors are verified before they are passed on: all weights must arrive, bit-identical to the trainer's.
    Tied weights may arrive under any or all of their names, if the values are equal.
    """

    def __init__(self, skeleton: nn.Module, dtype: torch.dtype) -> None:
        """`skeleton`: the transformers model on the meta device; `dtype`: that of the engine's weights, in which
        fingerprints are computed."""
        self._skeleton, self._dtype = skeleton, dtype
        self._shapes = {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}
        self._first_names = tied_names(skeleton)
        self._fingerprints: dict[str, int] = {}
        """Fingerprints of the tensors received since `begin`."""

    def check_manifest(self, manifest: Manifest | None) -> None:
        if manifest is not None:
            for name, spec in manifest.items():
                self._check_shape(name, tuple(spec.shape))
            self._require_all(set(manifest), "is not in the trainer's manifest")

    def requested_rows(self) -> RequestedRows | None:
        return None

    def begin(self) -> None:
        self._fingerprints = {}
        self._begin_update()

    def load(self, tensors: Bucket) -> None:
        for key, tensor in tensors.items():
            if not isinstance(key, str):
                raise WeightMismatchError(f"weights: received rows of {key.name!r}; this engine needs whole tensors.")
            self._check_shape(key, tuple(tensor.shape))
        self._fingerprints.update({str(key): total for key, total in fingerprints(tensors, self._dtype).items()})
        self._send(checkpoint_tensors(tensors, self._skeleton))

    def verify(self, expected: Mapping[str, int]) -> None:
        received = self._fingerprints
        self._require_all(set(received), "never arrived")
        unchecked = sorted(set(received) - set(expected))
        if unchecked:
            raise WeightMismatchError(f"weights: the trainer sent {unchecked[0]!r} without a fingerprint.")
        wrong = [name for name, total in expected.items() if received.get(name) != total]
        wrong += [name for name, total in received.items() if received.get(self._first_names[name], total) != total]
        if wrong:
            name = wrong[0]
            raise WeightMismatchError(
                f"weights: {name!r} differs from the trainer's (fingerprint {received.get(name)} received,"
                f" {expected[name]} sent; {len(wrong)} of {len(expected)} tensors differ). The weight sync lost or"
                " changed data, or the trainer does not tie weights that the rollout ties."
            )
        self._finish_update()

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._shapes:
            raise WeightMismatchError(f"weights: the rollout's model has no {name!r}. Both must be the same model.")
        if self._shapes[name] != shape:
            expected = list(self._shapes[name])
            raise WeightMismatchError(f"weights: {name!r} is {list(shape)} in the trainer and {expected} here.")

    def _require_all(self, names: set[str], problem: str) -> None:
        first_names = {self._first_names[name] for name in names}
        for name in self._shapes:
            if self._first_names[name] not in first_names:
                raise WeightMismatchError(f"weights: {name!r} {problem}. The engine would mix two models.")

    @abstractmethod
    def _begin_update(self) -> None:
        """Prepare the engine for an update; the last one may have failed before its end."""

    @abstractmethod
    def _send(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Load tensors, which are only valid during the call, into the engine."""

    @abstractmethod
    def _finish_update(self) -> None:
        """All tensors were sent and verified: the engine may post-process them."""


def checkpoint_tensors(bucket: Bucket, skeleton: Any) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) pairs as `save_pretrained` would write them; `skeleton` is the model on the meta device.

    transformers may hold several tensors of a checkpoint in one (the experts of a layer); the results are views of it.
    A tied weight gets the first of its names.
    """
    from transformers.core_model_loading import revert_weight_conversion

    first_names = tied_names(skeleton)
    whole = {first_names.get(key, key): tensor for key, tensor in bucket.items() if isinstance(key, str)}
    return list(revert_weight_conversion(skeleton, whole).items())


def tied_names(module: nn.Module) -> dict[str, str]:
    """By name of every weight: the first name of the same tensor."""
    first: dict[int, str] = {}
    state = module.state_dict(keep_vars=True)
    return {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}
