"""EngineWeights: the engine's weights at fixed addresses, updated in place and verified by fingerprints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from verl.inference.memory import Region
from verl.inference.tensor_parallel import SINGLE, TensorParallel
from verl.types.weights import Bucket, Manifest, RequestedRows, TensorSlice, WeightMismatchError
from verl.utils.weight_fingerprint import Placement, fingerprints

__all__ = ["EngineWeights", "WeightShard", "pack_module", "padded"]

_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class WeightShard:
    """This rank's part of a tensor: entries `start` to `start + length` of the `full` entries of dimension `dim`."""

    dim: int
    start: int
    length: int
    full: int
    counted: bool = True
    """Whether this rank's part enters the fingerprint; of replicated parts only one is counted."""


class EngineWeights:
    """Tensors by HF name, all in one region. Tied weights may be loaded under any or all of their names.

    `shards`: tensors of which this tensor-parallel rank has a part. Loaded tensors may be whole or row slices; rows
    that are not on this rank are ignored.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        region: Region,
        dtype: torch.dtype,
        shards: Mapping[str, WeightShard] | None = None,
        parallel: TensorParallel = SINGLE,
        keep: bool = True,
        adapters: Mapping[str, torch.Tensor] | None = None,
        reset_adapters: Callable[[], None] = lambda: None,
    ) -> None:
        """`keep`: offloading keeps the values in host memory; otherwise the next update must load them.

        `adapters`: the policy's LoRA adapter. The other weights are then frozen: once they are verified, updates
        consist of the adapter only. `reset_adapters` initialises the memory of adapters after it was discarded.
        """
        self._tensors, self._keep = {**tensors, **(adapters or {})}, keep
        self._adapters, self._reset_adapters = frozenset(adapters or ()), reset_adapters
        self._base_verified = False
        self._updated = frozenset(self._tensors)
        """Names of the tensors of the current update."""
        self._region = region
        self._dtype = dtype
        self._shards = dict(shards or {})
        self._parallel = parallel
        # Names that share memory (tied weights); one of each group must be loaded.
        self._groups: dict[int, list[str]] = {}
        for name, tensor in self._tensors.items():
            self._groups.setdefault(tensor.data_ptr(), []).append(name)
        self._received_rows: dict[str, int] = {}  # number of rows received, by name
        self._host_copy: torch.Tensor | None = None
        self._offloaded = False

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights by HF name."""
        return dict(self._tensors)

    # ---------------------------------------------------------------- updates

    def check_manifest(self, manifest: Manifest | None) -> None:
        """Raise WeightMismatchError if the trainer's model differs, before any weight is overwritten."""
        if manifest is None:
            return
        for name, spec in manifest.items():
            self._check(name, tuple(spec.shape))
        self._require_all(set(manifest), "is not in the trainer's manifest")

    def requested_rows(self) -> RequestedRows:
        """The rows on this rank of each tensor that the next update must contain."""
        return {name: self._rows(name) for name in self._required()}

    def begin(self) -> None:
        """Start an update: no weight has been received."""
        self._received_rows = {}
        self._updated = self._required()

    @torch.no_grad()
    def load(self, tensors: Bucket) -> None:
        """Copy a bucket of tensors into the weights, in place, with a cast to the engine's dtype."""
        destinations, sources = [], []
        for key, tensor in tensors.items():
            name = key if isinstance(key, str) else key.name
            self._check(name, self._whole_shape(key, tensor))
            if name not in self._updated:
                # Frozen weights that are sent again are not necessarily complete: all must be.
                self._updated, self._base_verified = frozenset(self._tensors), False
            destination, source = self._destination_and_source(name, 0 if isinstance(key, str) else key.start, tensor)
            destinations.append(destination)
            sources.append(source)
            self._received_rows[name] = self._received_rows.get(name, 0) + _num_rows(tensor.shape)
        if sources:
            torch._foreach_copy_(destinations, sources)

    def verify(self, expected: Mapping[str, int]) -> None:
        """Raise WeightMismatchError unless every weight was received and matches its fingerprint bit for bit.

        A collective of the ranks that share the model: an error on one of them is raised on all.
        """
        error: Exception | None = None
        try:
            self._check_received(expected)
        except WeightMismatchError as problem:
            error = problem
        # A rank that has failed before (`BaseRollout.exchange_error`) or fails here takes no part in the sums below.
        error = self._parallel.exchange_error(error)
        if error is not None:
            raise error
        actual = self._fingerprints([name for name in expected if name in self._tensors])
        wrong = [name for name, total in expected.items() if actual.get(name) != total]
        if wrong:
            name = wrong[0]
            raise WeightMismatchError(
                f"weights: {name!r} differs from the trainer's (fingerprint {actual.get(name)} here, {expected[name]}"
                f" there; {len(wrong)} of {len(expected)} tensors differ). The weight sync lost or changed data."
            )
        self._base_verified = bool(self._adapters)

    def _check_received(self, expected: Mapping[str, int]) -> None:
        """Raise WeightMismatchError unless all rows of all updated weights were received, with fingerprints."""
        whole = {name for name, rows in self._received_rows.items() if rows >= len(self._rows(name))}
        self._require_all(whole, "was not received, or not all of its rows", self._updated)
        unchecked = sorted(set(self._received_rows) - set(expected))
        if unchecked:
            raise WeightMismatchError(f"weights: the trainer sent {unchecked[0]!r} without a fingerprint.")

    def _required(self) -> frozenset[str]:
        """Names of the tensors that the next update must contain."""
        return self._adapters if self._base_verified else frozenset(self._tensors)

    # ---------------------------------------------------------------- memory

    @property
    def held_bytes(self) -> int:
        """Device bytes that are currently allocated."""
        return self._region.size if self._region.held else 0

    def offload(self) -> None:
        """Free the device memory; tensors, views and ties stay valid for `onload`."""
        if not self._region.held:
            return
        if self._keep:
            if self._host_copy is None:
                pinned = self._region.device.type == "cuda"
                self._host_copy = torch.empty(self._region.size, dtype=torch.uint8, pin_memory=pinned)
            self._host_copy.copy_(self._region.bytes)
            self._offloaded = True
        else:
            self._base_verified = False
        self._region.release()

    def onload(self) -> None:
        """Allocate the memory again and restore the values if they were kept."""
        self._region.restore()
        if self._offloaded and self._host_copy is not None:
            self._region.bytes.copy_(self._host_copy)
            self._offloaded = False
        elif not self._keep:
            self._reset_adapters()

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._tensors:
            raise WeightMismatchError(f"weights: the rollout's model has no {name!r}. Both must be the same model.")
        here = self._full_shape(name)
        if here != shape:
            raise WeightMismatchError(f"weights: {name!r} is {list(shape)} in the trainer and {list(here)} here.")

    def _full_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the unsharded tensor."""
        here = tuple(self._tensors[name].shape)
        if name not in self._shards:
            return here
        shard = self._shards[name]
        return (*here[: shard.dim], shard.full, *here[shard.dim + 1 :])

    def _whole_shape(self, key: str | TensorSlice, tensor: torch.Tensor) -> tuple[int, ...]:
        """Shape of the full tensor of which `tensor` is all rows or a row slice."""
        if isinstance(key, str) or key.name not in self._tensors:
            return tuple(tensor.shape)
        rows = _num_rows(self._full_shape(key.name))
        if not 0 <= key.start < key.stop <= rows or key.stop - key.start != len(tensor):
            raise WeightMismatchError(
                f"weights: got {len(tensor)} rows as rows {key.start} to {key.stop} of {key.name!r}, which has {rows}."
            )
        return (rows, *tensor.shape[1:])

    def _rows(self, name: str) -> range:
        """Rows of the full tensor on this rank."""
        shard = self._shards.get(name)
        if shard is None or shard.dim:
            return range(_num_rows(self._tensors[name].shape))
        return range(shard.start, shard.start + shard.length)

    def _destination_and_source(self, name: str, start: int, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(destination, source) of the part of `tensor`, whose rows begin at `start`, that belongs to this rank."""
        place, shard, own = self._tensors[name], self._shards.get(name), self._rows(name)
        if shard is not None and shard.dim:
            tensor = tensor.narrow(shard.dim, shard.start, shard.length)
        if len(own) == _num_rows(tensor.shape) and start == own.start:
            return place, tensor
        first, end = max(start, own.start), min(start + len(tensor), own.stop)
        count = max(0, end - first)
        return place[first - own.start :][:count], tensor[first - start :][:count]

    def _fingerprints(self, names: Sequence[str]) -> dict[str, int]:
        """Fingerprints of the received weights.

        Those of sharded tensors that were sent whole are summed over the ranks that share the model. The others
        (replicated, or sent as this rank's rows only) are local.
        """
        places = {
            name: Placement.of_shard(self._tensors[name].shape, shard.dim, shard.start, shard.full)
            for name, shard in self._shards.items()
        }
        here = fingerprints({name: self._tensors[name] for name in names}, self._dtype, places)
        if self._parallel.size == 1:
            return here
        parts = [name for name in names if name in self._shards]
        whole = [name for name in parts if self._received_rows.get(name) == _num_rows(self._full_shape(name))]
        sums = torch.tensor([here[name] if self._shards[name].counted else 0 for name in whole], dtype=torch.int64)
        dist.all_reduce(sums, group=self._parallel.cpu_group)
        return here | dict(zip(whole, sums.tolist(), strict=True))

    def _require_all(self, names: set[str], problem: str, required: frozenset[str] | None = None) -> None:
        """Raise WeightMismatchError unless `names` has one name of each tensor in `required` (None: of all)."""
        for group in self._groups.values():
            if not names.intersection(group) and (required is None or required.intersection(group)):
                raise WeightMismatchError(f"weights: {group[0]!r} {problem}. The engine would mix two models.")


def _num_rows(shape: Sequence[int]) -> int:
    return shape[0] if len(shape) else 1


def pack_module(module: nn.Module, device: torch.device | str, dtype: torch.dtype) -> Region:
    """Move a module to `device`, its weights into one region with `dtype`; ties are preserved.

    Buffers outside of the state dict (rotary frequencies) keep their dtype.
    """
    weights = {id(tensor): tensor for tensor in module.state_dict(keep_vars=True).values()}
    dtypes = {key: dtype if tensor.is_floating_point() else tensor.dtype for key, tensor in weights.items()}
    starts, size = {}, 0
    for key, tensor in weights.items():
        starts[key] = size
        size += padded(tensor.numel() * dtypes[key].itemsize)
    region = Region(size, device)
    for key, tensor in weights.items():
        end = starts[key] + tensor.numel() * dtypes[key].itemsize
        place = region.bytes[starts[key] : end].view(dtypes[key]).view(tensor.shape)
        place.copy_(tensor.detach())
        tensor.data = place
    for buffer in module.buffers():
        if id(buffer) not in weights:
            buffer.data = buffer.data.to(device)
    return region


def padded(size: int) -> int:
    """`size` rounded up to the alignment that vector loads and matmul kernels need."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
