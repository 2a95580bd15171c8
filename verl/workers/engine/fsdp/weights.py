"""The weights of a sharded model by Hugging Face name: in buckets for a weight sync, or whole for an export."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from verl.models.lora import Adapters
from verl.types.weights import (
    BucketTensors,
    Manifest,
    RequestedRows,
    TensorSlice,
    TensorSpec,
    bucket_key,
    bucketed,
    distinct_requests,
    overlap,
)
from verl.utils.checkpoint.manifest import ChecksumRecorder
from verl.workers.engine.common import groups
from verl.workers.engine.common.hf_export import write_safetensors
from verl.workers.engine.common.offload import sharded_like


class ModelWeights:
    """The weights of the model `hf` by their names without adapters."""

    def __init__(self, hf: Any, adapters: Adapters | None, device: torch.device) -> None:
        self._hf = hf
        self._adapters = adapters
        self._device = device

    def named(self) -> dict[str, torch.Tensor]:
        """Return every sharded weight without adapters; tied weights under each of their names."""
        state = self._hf.state_dict()
        return state if self._adapters is None else self._adapters.plain(state)

    @cached_property
    def manifest(self) -> Manifest:
        """Shapes and dtypes, which never change."""
        return {name: TensorSpec(tuple(value.shape), value.dtype) for name, value in self.named().items()}

    def local_tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor, adapters included, by its name in memory; tied tensors under their first name."""
        state = self._hf.state_dict()
        return {name: value for name, value in state.items() if self._first_names.get(name, name) == name}

    def stored(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a checkpoint stores: the trained tensors."""
        return self.trained(self.local_tensors())

    def trained(self, local_tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the trained tensors out of `local_tensors`."""
        return dict(local_tensors) if self._adapters is None else self._adapters.trained(local_tensors)

    @cached_property
    def _first_names(self) -> dict[str, str]:
        """The first name of every parameter."""
        first: dict[int, str] = {}
        named = self._hf.named_parameters(remove_duplicate=False)
        return {name: first.setdefault(id(value), name) for name, value in named}

    def buckets(
        self, dtype: torch.dtype | None, max_bytes: int, requested: Sequence[RequestedRows] | None
    ) -> Iterator[BucketTensors]:
        """See `TrainEngine.buckets`. A weight with an adapter is gathered whole on every rank."""
        routing = None if requested is None else RowRouting(requested)
        for bucket in bucketed(self._slabs(dtype, max_bytes, routing), max_bytes):
            adapted = [slab for slab in bucket if self._has_adapter(slab.name)]
            rows = gather([slab for slab in bucket if slab not in adapted], self._device, routing)
            state = self._hf.state_dict() if adapted else {}
            for slab in adapted:
                full = self._merged(slab, state)
                rows |= {slab.name: full} if routing is None else routing.own_rows(slab, full)
            yield rows

    def _slabs(
        self, dtype: torch.dtype | None, max_bytes: int, routing: RowRouting | None
    ) -> Iterator[tuple[Slab, int]]:
        """Yield the slabs to send, with their sizes. They depend on names and shapes only, so that all ranks form equal
        buckets."""
        for name, value in self.named().items():
            if routing is not None and not routing.is_requested(name):
                continue
            target = dtype if dtype is not None and value.is_floating_point() else value.dtype
            whole = Slab(name, value, target)
            slabs = [whole] if routing is None or self._has_adapter(name) else whole.split(max_bytes)
            yield from ((slab, slab.nbytes) for slab in slabs)

    def _merged(self, slab: Slab, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the full weight with its adapter. A collective."""
        assert self._adapters is not None
        sharded = [slab.value, *(state[name] for name in self._adapters.matrices(slab.name))]
        full = [full_tensor(value, value.dtype, self._device) for value in sharded]
        return self._adapters.merged(slab.name, *full).to(slab.dtype)

    def _has_adapter(self, name: str) -> bool:
        return self._adapters is not None and self._adapters.has_adapter(name)

    def gather_on_rank0(
        self, local_tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, group: dist.ProcessGroup | None
    ) -> Callable[[str], torch.Tensor | None]:
        """See `NamedWeights.gather_on_rank0`; adapters are merged."""
        plain = local_tensors if self._adapters is None else self._adapters.plain(local_tensors)

        def gather_one(name: str) -> torch.Tensor | None:
            value = plain[self._first_names.get(name, name)]
            target = dtype if value.is_floating_point() else value.dtype
            if self._adapters is None or not self._adapters.has_adapter(name):
                return full_on_rank0(value, target, group)
            sharded = [value, *(local_tensors[matrix] for matrix in self._adapters.matrices(name))]
            full = [full_on_rank0(part, part.dtype, group) for part in sharded]
            return self._adapters.merged(name, *full).to(target) if dist.get_rank() == 0 else None

        return gather_one

    def write_adapter(
        self, trained: Mapping[str, torch.Tensor], folder: Path, source: str, group: dist.ProcessGroup | None
    ) -> None:
        """Write adapters (and a value head) in peft's format, with `source` as their base model. A collective.

        No effect for a model without adapters.
        """
        if self._adapters is None:
            return
        state = {
            self._adapters.peft_name(name): full_on_rank0(value, value.dtype, group) for name, value in trained.items()
        }
        with groups.raise_on_all_ranks(group):
            if dist.get_rank() == 0:
                with ChecksumRecorder(folder) as recorder, recorder.open("adapter_model.safetensors") as stream:
                    write_safetensors(state, state.values(), stream)
                self._adapters.peft_config(source).save_pretrained(str(folder))


class UnmergedWeights:
    """See `UnmergedSource`: the frozen weights of a model and its adapters."""

    def __init__(self, hf: Any, adapters: Adapters, device: torch.device, prepare: Callable[[], None]) -> None:
        """`prepare` is called before weights are read."""
        names: dict[str, str] = {}
        scales: dict[str, float] = {}
        for layer in sorted(adapters.layers):
            matrices = f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"
            names |= dict(zip(matrices, adapters.matrices(f"{layer}.weight"), strict=True))
            scales[matrices[1]] = adapters.scale(layer)
        self._weights = _WeightsAndMatrices(hf, adapters, device, names)
        self._scales, self._prepare = scales, prepare
        self.trained_names = frozenset(names)

    def manifest(self) -> Manifest:
        return self._weights.manifest

    def buckets(
        self, dtype: torch.dtype | None, max_bytes: int, requested: Sequence[RequestedRows] | None = None
    ) -> Iterator[BucketTensors]:
        self._prepare()
        for bucket in self._weights.buckets(dtype, max_bytes, requested):
            yield {key: self._scaled(key, rows) for key, rows in bucket.items()}

    def _scaled(self, key: str | TensorSlice, rows: torch.Tensor) -> torch.Tensor:
        scale = self._scales.get(key if isinstance(key, str) else key.name, 1.0)
        return rows if scale == 1 else (rows.float() * scale).to(rows.dtype)


class _WeightsAndMatrices(ModelWeights):
    """The weights without adapters, and the matrices of the adapters under the keys of `names`, whose values are the
    matrices' names in the model."""

    def __init__(self, hf: Any, adapters: Adapters, device: torch.device, names: Mapping[str, str]) -> None:
        super().__init__(hf, adapters, device)
        self._matrix_names = names

    def named(self) -> dict[str, torch.Tensor]:
        state = self._hf.state_dict()
        return super().named() | {name: state[matrix] for name, matrix in self._matrix_names.items()}

    def _has_adapter(self, name: str) -> bool:
        return False  # nothing is merged


@dataclass(frozen=True, eq=False)
class Slab:
    """Rows `start` to `stop` (None: the end) of every rank's shard of a weight, to be sent in `dtype`."""

    name: str
    value: Any
    dtype: torch.dtype
    start: int = 0
    stop: int | None = None

    @cached_property
    def shards(self) -> int:
        """Number of ranks over which the rows of the weight are split; 1 if each rank has all rows."""
        return _shard_mesh(self.value.device_mesh).size() if isinstance(self.value, DTensor) and self.value.ndim else 1

    @cached_property
    def height(self) -> int:
        """Rows of a shard; the last ranks may have fewer."""
        return math.ceil(_num_rows(self.value) / self.shards)

    @cached_property
    def width(self) -> int:
        """Elements of a row."""
        return math.prod(self.value.shape[1:])

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the rows of all shards."""
        if self.stop is None:
            return self.dtype.itemsize * self.value.numel()
        return self.dtype.itemsize * self.width * sum(len(self.rows_of(shard)) for shard in range(self.shards))

    def split(self, max_bytes: int) -> Iterator[Slab]:
        """Yield slabs of at most `max_bytes`, each with the same rows of every shard, and at least one row."""
        step = max(1, max_bytes // max(1, self.dtype.itemsize * self.width * self.shards))
        if self.nbytes <= max_bytes or step >= self.height:
            yield self
            return
        for start in range(0, self.height, step):
            yield replace(self, start=start, stop=min(start + step, self.height))

    def rows_of(self, shard: int) -> range:
        """Return the rows of the full tensor that are in this slab of a shard."""
        first = shard * self.height
        stop = self.height if self.stop is None else min(self.stop, self.height)
        return range(first + self.start, min(first + stop, _num_rows(self.value)))

    def keyed(self, rows: range, tensor: torch.Tensor) -> BucketTensors:
        """Return these rows of the full tensor as entry of a bucket."""
        return {bucket_key(self.name, rows, _num_rows(self.value)): tensor}


class RowRouting:
    """Which ranks receive which rows of each weight."""

    def __init__(self, requested: Sequence[RequestedRows]) -> None:
        """`requested`: the request of every rank, the same on all ranks; equal requests may share one object."""
        self._requested = requested
        self._distinct = distinct_requests(requested)
        self._own = requested[dist.get_rank()]

    def is_requested(self, name: str) -> bool:
        return any(name in request for request in self._distinct)

    def all_request_all(self, name: str, rows: int) -> bool:
        """Return whether every rank requests all rows."""
        return all(len(request.get(name, ())) == rows for request in self._distinct)

    def of_group(self, group: dist.ProcessGroup) -> list[RequestedRows]:
        """Return the requests of the ranks of a group."""
        return [self._requested[rank] for rank in dist.get_process_group_ranks(group)]

    def own_rows(self, slab: Slab, tensor: torch.Tensor) -> BucketTensors:
        """Return the rows of `tensor`, an unsharded slab, that this rank requests."""
        present = range(slab.start, slab.start + _num_rows(tensor))
        own = overlap(present, self._own.get(slab.name, range(0)))
        if slab.name in self._own and len(own) == len(present):
            return slab.keyed(own, tensor)
        return slab.keyed(own, tensor[own.start - present.start : own.stop - present.start]) if own else {}


def gather(slabs: Sequence[Slab], device: torch.device, routing: RowRouting | None) -> BucketTensors:
    """Return this rank's rows of the slabs; slabs of equal mesh, dtype and routing share one collective."""
    result: BucketTensors = {}
    batches: dict[tuple[DeviceMesh, torch.dtype, bool], list[Slab]] = {}
    for slab in slabs:
        if slab.shards > 1:
            to_all = routing is None or (
                slab.stop is None and routing.all_request_all(slab.name, _num_rows(slab.value))
            )
            batches.setdefault((slab.value.device_mesh, slab.dtype, to_all), []).append(slab)
        elif routing is None:
            result[slab.name] = full_tensor(slab.value, slab.dtype, device)
        else:
            value = full_tensor(slab.value, slab.value.dtype, device)
            own = routing.own_rows(slab, value if slab.stop is None else value[slab.start : slab.stop])
            result |= {key: rows.to(slab.dtype) for key, rows in own.items()}
    for (mesh, dtype, to_all), batch in batches.items():
        shards = _shard_mesh(mesh)
        if to_all:
            tensors = _all_gather_batch([slab.value for slab in batch], shards, dtype, device)
            result |= zip((slab.name for slab in batch), tensors, strict=True)
        elif routing is not None:
            result |= _exchange(batch, shards, dtype, device, routing.of_group(shards.get_group()))
    return result


@lru_cache(maxsize=8)
def _shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the ranks that share one copy of the weights. Cached: slicing a 2-D mesh takes a millisecond."""
    return mesh["shard"]


# Renamed in torch 2.13, which warns about the old name.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def _all_gather_batch(
    values: list[Any], mesh: DeviceMesh, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Return the full tensors of DTensors with even shards along dim 0, of which the last ranks may have fewer rows."""
    ranks = mesh.size()
    rows = [-(-value.shape[0] // ranks) for value in values]
    sizes = [count * math.prod(value.shape[1:]) for count, value in zip(rows, values, strict=True)]
    own = torch.empty(sum(sizes), dtype=dtype, device=device)
    for target, value in zip(own.split(sizes), values, strict=True):
        shard = value.detach().to_local()
        target[: shard.numel()].copy_(shard.flatten())
    parts = torch.empty(ranks, len(own), dtype=dtype, device=device)
    _all_gather(parts.view(-1), own, group=mesh.get_group())
    return [
        part.reshape(ranks * count, *value.shape[1:])[: value.shape[0]]
        for part, count, value in zip(parts.split(sizes, dim=1), rows, values, strict=True)
    ]


def _exchange(
    slabs: Sequence[Slab],
    mesh: DeviceMesh,
    dtype: torch.dtype,
    device: torch.device,
    requested: Sequence[RequestedRows],
) -> BucketTensors:
    """Send each rank of the mesh the rows it requests (all-to-all); return this rank's rows."""
    if not any(slab.name in request for slab, request in product(slabs, requested)):
        return {}  # another copy of the weights serves the ranks that request them
    me = mesh.get_local_rank()
    outgoing = [_requested_rows(slabs, me, request) for request in requested]
    incoming = [_requested_rows(slabs, rank, requested[me]) for rank in range(mesh.size())]
    out_sizes, in_sizes = (
        [sum(len(rows) * slab.width for slab, rows in parts) for parts in direction]
        for direction in (outgoing, incoming)
    )
    sent = torch.empty(sum(out_sizes), dtype=dtype, device=device)
    received = torch.empty(sum(in_sizes), dtype=dtype, device=device)
    at = 0
    for slab, rows in chain(*outgoing):
        first = me * slab.height
        shard = slab.value.detach().to_local()[rows.start - first : rows.stop - first].flatten()
        sent[at : at + len(shard)].copy_(shard)
        at += len(shard)
    dist.all_to_all_single(received, sent, in_sizes, out_sizes, group=mesh.get_group())
    by_slab: dict[Slab, list[tuple[range, torch.Tensor]]] = {}
    at = 0
    for slab, rows in chain(*incoming):
        size = len(rows) * slab.width
        part = received[at : at + size].view(len(rows), *slab.value.shape[1:])
        by_slab.setdefault(slab, []).append((rows, part))
        at += size
    result: BucketTensors = {}
    for slab, parts in by_slab.items():
        result |= _joined(slab, parts)
    return result


def _requested_rows(slabs: Sequence[Slab], shard: int, requested: RequestedRows) -> list[tuple[Slab, range]]:
    """Return the requested rows that a shard contains, by slab."""
    rows = ((slab, overlap(slab.rows_of(shard), requested.get(slab.name, range(0)))) for slab in slabs)
    return [(slab, requested) for slab, requested in rows if requested]


def _joined(slab: Slab, parts: list[tuple[range, torch.Tensor]]) -> BucketTensors:
    """Concatenate the parts of whole shards, whose rows are consecutive; parts of split shards stay separate."""
    if slab.stop is not None:
        return {TensorSlice(slab.name, rows.start, rows.stop): part for rows, part in parts}
    tensor = torch.cat([part for _, part in parts]) if len(parts) > 1 else parts[0][1]
    return slab.keyed(range(parts[0][0].start, parts[-1][0].stop), tensor)


def full_tensor(value: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the full tensor on `device`, also if shards are in host memory. A collective for DTensors."""
    value = value.detach()
    if not isinstance(value, DTensor):
        return value.to(device, dtype)
    # Cast the shard, not the DTensor: dispatching a DTensor operation costs more than copying a small weight.
    local = value.to_local().to(device, dtype)
    if value.device_mesh.size() == 1:
        return local
    moved: Any = sharded_like(value, local)
    return moved.full_tensor()


def full_on_rank0(value: torch.Tensor, dtype: torch.dtype, group: dist.ProcessGroup | None) -> torch.Tensor | None:
    """Return the full tensor in host memory of rank 0, None elsewhere. A collective of `group` for DTensors."""
    slab, rank = Slab("", value.detach(), dtype), dist.get_rank()
    local = slab.value.to_local() if isinstance(slab.value, DTensor) else slab.value
    # The ranks of the first copy of the weights have the lowest numbers.
    if slab.shards == 1 or rank >= slab.shards:
        return local.to("cpu", dtype) if rank == 0 else None
    if rank > 0:
        if local.numel():
            dist.send(local.to("cpu", dtype).contiguous(), dst=0, group=group)
        return None
    full = torch.empty(slab.value.shape, dtype=dtype)
    for shard in range(slab.shards):
        rows = slab.rows_of(shard)
        if shard == 0:
            full[: len(rows)].copy_(local)
        elif rows:
            dist.recv(full[rows.start : rows.stop], src=shard, group=group)
    return full


def _num_rows(value: torch.Tensor) -> int:
    return value.shape[0] if value.ndim else 1
