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
from verl.types.weights import Manifest, TensorSlice, TensorSpec, Wanted
from verl.utils.checkpoint.manifest import ChecksumRecorder
from verl.workers.engine.common import groups
from verl.workers.engine.common.hf_export import write_safetensors
from verl.workers.engine.common.weights import bucketed


class ModelWeights:
    """Of the model `hf`, which has `adapters` or not. Names are those of the model without adapters."""

    def __init__(self, hf: Any, adapters: Adapters | None, device: torch.device) -> None:
        self._hf = hf
        self._adapters = adapters
        self._device = device

    def named(self) -> dict[str, torch.Tensor]:
        """Every weight as it is sharded now, adapters left out; tied ones under each of their names."""
        state = self._hf.state_dict()
        return state if self._adapters is None else self._adapters.plain(state)

    @cached_property
    def manifest(self) -> Manifest:
        """Their shapes and types, which never change."""
        return {name: TensorSpec(tuple(value.shape), value.dtype) for name, value in self.named().items()}

    def everything(self) -> dict[str, torch.Tensor]:
        """Every tensor, adapters' too, under the name it has here; tied ones under their first."""
        return {name: value for name, value in self._hf.state_dict().items() if self._tied.get(name, name) == name}

    def stored(self) -> dict[str, torch.Tensor]:
        """What of that a checkpoint must hold to continue: what learns."""
        return self.trained(self.everything())

    def trained(self, everything: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those of every tensor that learn."""
        return dict(everything) if self._adapters is None else self._adapters.trained(everything)

    @cached_property
    def _tied(self) -> dict[str, str]:
        """Of every parameter the first name."""
        first: dict[int, str] = {}
        named = self._hf.named_parameters(remove_duplicate=False)
        return {name: first.setdefault(id(value), name) for name, value in named}

    def buckets(
        self, dtype: torch.dtype | None, max_bytes: int, wanted: Sequence[Wanted] | None
    ) -> Iterator[dict[str | TensorSlice, torch.Tensor]]:
        """See `TrainEngine.buckets`. A weight with an adapter is put together whole on every rank."""
        route = None if wanted is None else Route(wanted)
        for bucket in bucketed(self._strips(dtype, max_bytes, route), max_bytes):
            adapted = [strip for strip in bucket if self._has_adapter(strip.name)]
            found = gathered([strip for strip in bucket if strip not in adapted], self._device, route)
            matrices = self._hf.state_dict() if adapted else {}
            for strip in adapted:
                whole = self._merged(strip, matrices)
                found |= {strip.name: whole} if route is None else route.own_rows(strip, whole)
            yield found

    def _strips(self, dtype: torch.dtype | None, max_bytes: int, route: Route | None) -> Iterator[tuple[Strip, int]]:
        """What is sent, with its size. Buckets depend only on names and shapes: every rank cuts the same ones."""
        for name, value in self.named().items():
            if route is not None and not route.leads_anywhere(name):
                continue
            target = dtype if dtype is not None and value.is_floating_point() else value.dtype
            size = target.itemsize * value.numel()
            parts = 1 if route is None or self._has_adapter(name) else math.ceil(size / max_bytes)
            for strip in cut(Strip(name, value, target), parts):
                yield strip, size // parts

    def _merged(self, strip: Strip, matrices: Mapping[str, torch.Tensor]) -> torch.Tensor:
        assert self._adapters is not None
        parts = [strip.value, *(matrices[name] for name in self._adapters.matrices(strip.name))]
        found = [whole_tensor(part, part.dtype, self._device) for part in parts]
        return self._adapters.merged(strip.name, *found).to(strip.dtype)

    def _has_adapter(self, name: str) -> bool:
        return self._adapters is not None and self._adapters.has(name)

    def whole(
        self, everything: Mapping[str, torch.Tensor], dtype: torch.dtype, group: dist.ProcessGroup | None
    ) -> Callable[[str], torch.Tensor | None]:
        """By the name of a weight: all of it with its adapter, in host memory of rank 0 alone. A collective.

        `everything`: these tensors, or what they were at some time.
        """
        plain = everything if self._adapters is None else self._adapters.plain(everything)

        def of(name: str) -> torch.Tensor | None:
            value = plain[self._tied.get(name, name)]
            target = dtype if value.is_floating_point() else value.dtype
            if self._adapters is None or not self._adapters.has(name):
                return on_first_rank(value, target, group)
            parts = [value, *(everything[matrix] for matrix in self._adapters.matrices(name))]
            found = [on_first_rank(part, part.dtype, group) for part in parts]
            return self._adapters.merged(name, *found).to(target) if dist.get_rank() == 0 else None

        return of

    def write_adapter(
        self, trained: Mapping[str, torch.Tensor], folder: Path, source: str, group: dist.ProcessGroup | None
    ) -> None:
        """The adapters alone (and a value head) as peft loads them onto the model `source`; a collective.

        Nothing is written for a model without adapters.
        """
        if self._adapters is None:
            return
        state = {
            self._adapters.peft_name(name): on_first_rank(value, value.dtype, group) for name, value in trained.items()
        }
        with groups.failing_together(group):
            if dist.get_rank() == 0:
                with ChecksumRecorder(folder) as recorder, recorder.open("adapter_model.safetensors") as stream:
                    write_safetensors(state, state.values(), stream)
                self._adapters.peft_config(source).save_pretrained(str(folder))


Found = dict["str | TensorSlice", torch.Tensor]


@dataclass(frozen=True, eq=False)
class Strip:
    """A weight on its way in `dtype`: the rows `start` to `stop` of every rank's shard of it (None: all)."""

    name: str
    value: Any
    dtype: torch.dtype
    start: int = 0
    stop: int | None = None

    @cached_property
    def shards(self) -> int:
        """Over how many ranks its rows are spread; 1 where each has all of them."""
        return _sharing(self.value.device_mesh).size() if isinstance(self.value, DTensor) and self.value.ndim else 1

    @cached_property
    def height(self) -> int:
        """Rows of a shard; the last ranks may have fewer."""
        return math.ceil(_rows(self.value) / self.shards)

    @cached_property
    def width(self) -> int:
        """Elements of a row."""
        return math.prod(self.value.shape[1:])

    def rows_of(self, rank: int) -> range:
        """Which rows of the whole tensor a rank of those that share it gives."""
        first = rank * self.height
        stop = self.height if self.stop is None else min(self.stop, self.height)
        return range(first + self.start, min(first + stop, _rows(self.value)))

    def keyed(self, rows: range, tensor: torch.Tensor) -> Found:
        """These rows of the whole tensor as a bucket has them."""
        return {self.name if len(rows) == _rows(self.value) else TensorSlice(self.name, rows.start, rows.stop): tensor}


class Route:
    """Where the rows of each weight go."""

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        """`wanted`: of every rank, the same on all; ranks that want the same may share one object."""
        self._wanted = wanted
        self._kinds = list({id(each): each for each in wanted}.values())
        self._mine = wanted[dist.get_rank()]

    def leads_anywhere(self, name: str) -> bool:
        return any(name in each for each in self._kinds)

    def is_whole(self, name: str, rows: int) -> bool:
        """Whether every rank wants all of it."""
        return all(len(each.get(name, ())) == rows for each in self._kinds)

    def of_group(self, group: dist.ProcessGroup) -> list[Wanted]:
        """What the ranks of a group want."""
        return [self._wanted[rank] for rank in dist.get_process_group_ranks(group)]

    def own_rows(self, strip: Strip, tensor: torch.Tensor) -> Found:
        """Of a strip that is all here, as `tensor`: the rows that this rank wants."""
        here = range(strip.start, strip.start + _rows(tensor))
        mine = _common(here, self._mine.get(strip.name, range(0)))
        if strip.name in self._mine and len(mine) == len(here):
            return strip.keyed(mine, tensor)
        return strip.keyed(mine, tensor[mine.start - here.start : mine.stop - here.start]) if mine else {}


def cut(strip: Strip, parts: int) -> Iterator[Strip]:
    """About `parts` strips of the same number of rows of every shard."""
    if parts <= 1:
        yield strip
        return
    step = math.ceil(strip.height / parts)
    for start in range(0, strip.height, step):
        yield replace(strip, start=start, stop=min(start + step, strip.height))


def gathered(strips: Sequence[Strip], device: torch.device, route: Route | None) -> Found:
    """What this rank gets of the strips; those that go the same way share one collective."""
    found: Found = {}
    alike: dict[tuple[DeviceMesh, torch.dtype, bool], list[Strip]] = {}
    for strip in strips:
        if strip.shards > 1:
            whole = route is None or (strip.stop is None and route.is_whole(strip.name, _rows(strip.value)))
            alike.setdefault((strip.value.device_mesh, strip.dtype, whole), []).append(strip)
        elif route is None:
            found[strip.name] = whole_tensor(strip.value, strip.dtype, device)
        else:
            value = whole_tensor(strip.value, strip.value.dtype, device)
            own = route.own_rows(strip, value if strip.stop is None else value[strip.start : strip.stop])
            found |= {key: rows.to(strip.dtype) for key, rows in own.items()}
    for (mesh, dtype, whole), group in alike.items():
        ranks = _sharing(mesh)
        if whole:
            tensors = _all_gathered([strip.value for strip in group], ranks, dtype, device)
            found |= zip((strip.name for strip in group), tensors, strict=True)
        elif route is not None:
            found |= _exchanged(group, ranks, dtype, device, route.of_group(ranks.get_group()))
    return found


@lru_cache(maxsize=8)
def _sharing(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks that share one copy. Kept: cutting it out of a mesh of two dimensions takes a millisecond each time."""
    return mesh["shard"]


# torch 2.13 gave it a new name and warns of the old one.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def _all_gathered(values: list[Any], mesh: DeviceMesh, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Of tensors cut along their first dimension into chunks of one size, of which the last ranks may lack some."""
    ranks = mesh.size()
    rows = [-(-value.shape[0] // ranks) for value in values]
    sizes = [count * math.prod(value.shape[1:]) for count, value in zip(rows, values, strict=True)]
    mine = torch.empty(sum(sizes), dtype=dtype, device=device)
    for place, value in zip(mine.split(sizes), values, strict=True):
        shard = value.detach().to_local()
        place[: shard.numel()].copy_(shard.flatten())
    parts = torch.empty(ranks, len(mine), dtype=dtype, device=device)
    _all_gather(parts.view(-1), mine, group=mesh.get_group())
    return [
        part.reshape(ranks * count, *value.shape[1:])[: value.shape[0]]
        for part, count, value in zip(parts.split(sizes, dim=1), rows, values, strict=True)
    ]


def _exchanged(
    strips: Sequence[Strip], mesh: DeviceMesh, dtype: torch.dtype, device: torch.device, wanted: Sequence[Wanted]
) -> Found:
    """Every rank of the mesh sends every other those of its rows that the other wants."""
    if not any(strip.name in each for strip, each in product(strips, wanted)):
        return {}  # another copy of the weights serves those that want them
    me = mesh.get_local_rank()
    outgoing = [_overlaps(strips, me, theirs) for theirs in wanted]
    incoming = [_overlaps(strips, rank, wanted[me]) for rank in range(mesh.size())]
    sizes = [[sum(len(rows) * strip.width for strip, rows in rank) for rank in way] for way in (outgoing, incoming)]
    sent, received = (torch.empty(sum(way), dtype=dtype, device=device) for way in sizes)
    at = 0
    for strip, rows in chain(*outgoing):
        first = me * strip.height
        shard = strip.value.detach().to_local()[rows.start - first : rows.stop - first].flatten()
        sent[at : at + len(shard)].copy_(shard)
        at += len(shard)
    dist.all_to_all_single(received, sent, sizes[1], sizes[0], group=mesh.get_group())
    parts: dict[Strip, list[tuple[range, torch.Tensor]]] = {}
    at = 0
    for strip, rows in chain(*incoming):
        size = len(rows) * strip.width
        part = received[at : at + size].view(len(rows), *strip.value.shape[1:])
        parts.setdefault(strip, []).append((rows, part))
        at += size
    found: Found = {}
    for strip, each in parts.items():
        found |= _joined(strip, each)
    return found


def _overlaps(strips: Sequence[Strip], giver: int, wanted: Wanted) -> list[tuple[Strip, range]]:
    """Which rows of the strips a rank has that are wanted."""
    found = ((strip, _common(strip.rows_of(giver), wanted.get(strip.name, range(0)))) for strip in strips)
    return [(strip, rows) for strip, rows in found if rows]


def _joined(strip: Strip, parts: list[tuple[range, torch.Tensor]]) -> Found:
    """Rows of a whole tensor follow each other: they are one piece. Those of a strip do not."""
    if strip.stop is not None:
        return {TensorSlice(strip.name, rows.start, rows.stop): part for rows, part in parts}
    tensor = torch.cat([part for _, part in parts]) if len(parts) > 1 else parts[0][1]
    return strip.keyed(range(parts[0][0].start, parts[-1][0].stop), tensor)


def whole_tensor(value: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The full tensor on `device`, also when shards wait in host memory; a collective for sharded ones."""
    value = value.detach()
    if not isinstance(value, DTensor):
        return value.to(device, dtype)
    # The shard, not the sharded tensor: an operation on that costs the host more than a small weight's copy.
    local = value.to_local().to(device, dtype)
    if value.device_mesh.size() == 1:
        return local
    moved = DTensor.from_local(
        local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )
    return moved.full_tensor()


def on_first_rank(value: torch.Tensor, dtype: torch.dtype, group: dist.ProcessGroup | None) -> torch.Tensor | None:
    """The full tensor, in host memory of rank 0 alone; a collective of `group` for sharded ones."""
    strip, rank = Strip("", value.detach(), dtype), dist.get_rank()
    local = strip.value.to_local() if isinstance(strip.value, DTensor) else strip.value
    # Of several copies of the weights, the first one's ranks have the first numbers.
    if strip.shards == 1 or rank >= strip.shards:
        return local.to("cpu", dtype) if rank == 0 else None
    if rank > 0:
        if local.numel():
            dist.send(local.to("cpu", dtype).contiguous(), dst=0, group=group)
        return None
    whole = torch.empty(strip.value.shape, dtype=dtype)
    for giver in range(strip.shards):
        rows = strip.rows_of(giver)
        if giver == 0:
            whole[: len(rows)].copy_(local)
        elif rows:
            dist.recv(whole[rows.start : rows.stop], src=giver, group=group)
    return whole


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _rows(value: torch.Tensor) -> int:
    return value.shape[0] if value.ndim else 1
