"""The weights of a model on Megatron-Core by Hugging Face name; loading them from a folder or a model in memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from verl.models.loading import ModelKind, pretrained_model
from verl.models.megatron_core import CoreArchitecture, CoreWeight, Piece, matrix_rectangles, shard_slices, weight_map
from verl.types.weights import BucketTensors, Manifest, RequestedRows, TensorSpec, bucketed, distinct_requests, overlap
from verl.workers.engine.common import groups
from verl.workers.engine.common.sharded_checkpoint import Chunk
from verl.workers.engine.megatron.gathering import (
    HeldRectangle,
    ModelCopy,
    RowRange,
    exchange,
    gather_everywhere,
    gather_on_rank0,
)
from verl.workers.engine.megatron.layout import CoreLayout, GroupRank
from verl.workers.engine.megatron.optimizer import optimizer_parts

logger = logging.getLogger(__name__)

_BUCKET_BYTES = 2**28


class CoreWeights:
    """The weights of one engine. Creating it is a collective, with the layout active."""

    requires_safetensors = False
    """Whether weights are read from safetensors files or a model in memory only, not from files that only transformers
    loads."""

    def __init__(
        self,
        chunks: Sequence[tuple[nn.Module, Mapping[str, str]]],
        layout: CoreLayout,
        arch: CoreArchitecture,
        kind: ModelKind,
        skeleton: nn.Module,
        device: torch.device,
    ) -> None:
        """`chunks`: this rank's modules, each with the names of its parameters in the full model; `skeleton`: the
        Hugging Face model on the meta device."""
        self._layout, self._arch = layout, arch
        self.kind: ModelKind = kind
        self.device = device
        self.table = {weight.name: weight for weight in weight_map(arch, kind)}
        """All weights of the model, by Core's names."""
        self.live = {full: module.get_parameter(name) for module, names in chunks for name, full in names.items()}
        """This rank's parameters (shards of weights), by Core's names in the full model."""
        self._tied = {"lm_head.weight": "model.embed_tokens.weight"} if arch.tied and kind == "causal_lm" else {}
        self._shapes = {name: tuple(value.shape) for name, value in skeleton.state_dict().items()}
        self._check_shapes()
        dtypes: list[dict[str, torch.dtype]] = [{} for _ in range(dist.get_world_size())]
        own = {hf: value.dtype for name, value in self.live.items() for hf in self.table[name].hf}
        dist.all_gather_object(dtypes, own)
        self._dtypes = {name: dtype for of_rank in dtypes for name, dtype in of_rank.items()}
        self._dense, self._experts = self._copies(lambda weight: weight)

    @cached_property
    def manifest(self) -> Manifest:
        """Shape and dtype of every weight; tied weights under each of their names."""
        return {name: TensorSpec(shape, self._dtypes[self.first_name(name)]) for name, shape in self._shapes.items()}

    def first_name(self, name: str) -> str:
        """Return the first name of a tied weight, otherwise `name`."""
        return self._tied.get(name, name)

    def buckets(
        self, dtype: torch.dtype | None, max_bytes: int, requested: Sequence[RequestedRows] | None
    ) -> Iterator[BucketTensors]:
        """See `TrainEngine.buckets`."""
        ranges = self._row_ranges(dtype, max_bytes, requested)
        for bucket in bucketed(((part, part.nbytes) for part in ranges), max_bytes):
            yield self._bucket(bucket, requested, max_bytes)

    def _row_ranges(
        self, dtype: torch.dtype | None, max_bytes: int, requested: Sequence[RequestedRows] | None
    ) -> list[RowRange]:
        """Return the rows to send, in the order of the manifest."""
        requests, ranges = distinct_requests(requested), list[RowRange]()
        for name, spec in self.manifest.items():
            if requested is not None and not any(name in request for request in requests):
                continue
            target = dtype if dtype is not None and spec.dtype.is_floating_point else spec.dtype
            part = RowRange(name, spec.shape, target, range(spec.shape[0]))
            ranges += [part] if requested is None or part.nbytes <= max_bytes else part.split(max_bytes)
        return ranges

    def _bucket(
        self, ranges: Sequence[RowRange], requested: Sequence[RequestedRows] | None, max_bytes: int
    ) -> BucketTensors:
        requests = distinct_requests(requested)
        result: BucketTensors = {}
        for copy in (self._dense, self._experts):
            in_copy = [part for part in ranges if part.name in copy.held]
            # Without requests, all ranks receive all rows.
            to_all = [
                part for part in in_copy if all(len(part.requested_by(req)) == len(part.rows) for req in requests)
            ]
            result |= gather_everywhere(to_all, copy, self.live, self.device)
            to_some = [part for part in in_copy if part not in to_all]
            if requested is not None and to_some:
                result |= exchange(to_some, copy, self.live, self.device, requested, max_bytes)
        # In the order of the manifest, as in other engines.
        order = {part.name: at for at, part in enumerate(ranges)}
        return dict(
            sorted(result.items(), key=lambda item: order[item[0] if isinstance(item[0], str) else item[0].name])
        )

    def local_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return this rank's live shards, by Core's names."""
        return self.live

    def gather_on_rank0(
        self, local_tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, group: dist.ProcessGroup | None
    ) -> Callable[[str], torch.Tensor | None]:
        """See `NamedWeights.gather_on_rank0`."""

        def gather_one(name: str) -> torch.Tensor | None:
            copy = self._dense if name in self._dense.held else self._experts
            target = dtype if self.manifest[name].dtype.is_floating_point else self.manifest[name].dtype
            return gather_on_rank0(name, self._shapes[name], copy, local_tensors, target, group)

        return gather_one

    def pieces(self, name: str, *, stored: bool = False) -> list[Piece]:
        """Return the slices that form this rank's shard of Core's weight `name`; `stored`: by their names on disk."""
        weight = self.table[name]
        group = self._tensor_group(weight)
        return shard_slices(weight, self._arch, group.rank, group.size, stored=stored)

    def read(self, name: str, files: HFFiles, *, stored: bool) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Yield this rank's shard of Core's weight `name` from Hugging Face files, piece by piece."""
        for piece in self.pieces(name, stored=stored):
            yield piece, files.read(piece.hf, piece.source)

    def chunks(self, name: str, values: torch.Tensor, start: int = 0) -> Iterator[Chunk]:
        """Yield `values` as rectangles of Hugging Face tensors that share its memory, without vocabulary padding.

        `values` are elements of this rank's shard of Core's weight `name`, from `start` on.
        """
        flat = values.detach().view(-1)
        for piece in self.pieces(name):
            box = _box(piece.source)
            rows, width = piece.place[0], len(box[-1]) if len(piece.place) > 1 else 1
            own = overlap(range(rows.start * width, rows.stop * width), range(start, start + len(flat)))
            for part in matrix_rectangles(width, own.start, own.stop):
                first = part.rows.start * width + part.columns.start - start
                down = box[-len(piece.place)].start + part.rows.start - rows.start
                across = (box[-1].start + part.columns.start,) if len(piece.place) > 1 else ()
                experts = (box[0].start,) if len(box) > len(piece.place) else ()
                shape = (*(1 for _ in experts), len(part.rows), *(len(part.columns) for _ in across))
                count = len(part.rows) * len(part.columns)
                view = flat[first : first + count].view(shape)
                yield Chunk(piece.hf, self._shapes[piece.hf], (*experts, down, *across), view)

    def writes(self, name: str) -> bool:
        """Return whether this rank writes Core's weight `name`: true on one of a copy's ranks with the same part."""
        weight = self.table[name]
        return weight.copy_of is None and (weight.split is not None or self._tensor_group(weight).rank == 0)

    def copy_number(self, name: str) -> int:
        """Return the index of the copy of the weight that this rank belongs to."""
        return (self._layout.dp_cp if self.table[name].expert is None else self._layout.expert_dp).rank

    def _tensor_group(self, weight: CoreWeight) -> GroupRank:
        """Return this rank's position in the tensor-parallel group that splits the weight."""
        return self._layout.tp if weight.expert is None else self._layout.etp

    def _copies(self, view: Callable[[CoreWeight], CoreWeight]) -> tuple[ModelCopy, ModelCopy]:
        """Return the copies of dense weights and of experts; `view` maps weights to the tensors to be gathered."""
        expert_group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
        return (
            self._copy(parallel_state.get_model_parallel_group(), self._layout.tp, False, view),
            self._copy(expert_group, self._layout.etp, True, view),
        )

    def _copy(
        self, group: dist.ProcessGroup, tensor: GroupRank, experts: bool, view: Callable[[CoreWeight], CoreWeight]
    ) -> ModelCopy:
        """Return the copy of the model on the ranks of `group`. A collective of `group`."""
        ranks = tuple(dist.get_process_group_ranks(group))
        own = [name for name in self.live if (self.table[name].expert is not None) == experts]
        parts: list[Any] = [None] * len(ranks)
        dist.all_gather_object(parts, (tensor.rank, {_part_key(self.table[name]) for name in own}), group=group)
        held: dict[str, list[HeldRectangle]] = {}
        for weight in self.table.values():
            if (weight.expert is not None) != experts or weight.copy_of is not None:
                continue
            for owner, (part, keys) in enumerate(parts):
                if _part_key(weight) in keys and (weight.split is not None or part == 0):
                    for piece in shard_slices(view(weight), self._arch, part, tensor.size):
                        rectangle = HeldRectangle(owner, weight.name, piece.place, _box(piece.source))
                        held.setdefault(piece.hf, []).append(rectangle)
        held |= {name: held[first] for name, first in self._tied.items() if first in held}
        return ModelCopy(group, ranks, held)

    def _check_shapes(self) -> None:
        for name, value in self.live.items():
            weight = self.table[name]
            expected = weight.shard_shape(self._tensor_group(weight).size)
            assert tuple(value.shape) == expected, f"{name}: shape {tuple(value.shape)}, expected {expected}"


def _part_key(weight: CoreWeight) -> tuple[Any, int | None]:
    """Return stage and expert, which ranks exchange instead of all names of their weights."""
    return weight.stage, weight.expert


def _box(source: Sequence[int | slice]) -> tuple[range, ...]:
    return tuple(range(at, at + 1) if isinstance(at, int) else range(at.start, at.stop) for at in source)


class HFFiles:
    """The safetensors files of a Hugging Face folder, for reading slices of tensors."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._files = [safe_open(file, framework="pt") for file in sorted(folder.glob("*.safetensors"))]

    @cached_property
    def _names(self) -> dict[str, Any]:
        return {name: file for file in self._files for name in file.keys()}

    def name_of(self, name: str) -> str | None:
        """Return the name in the files, without the prefix `model.` if the files have no head; None if not stored."""
        bare = name.removeprefix("model.")
        return name if name in self._names else bare if bare in self._names else None

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, where: tuple[int | slice, ...]) -> torch.Tensor:
        return self._slice(name)[where]

    def _slice(self, name: str) -> Any:
        stored = self.name_of(name)
        assert stored is not None, name
        return self._names[stored].get_slice(stored)


class _Targets:
    """Destinations of loaded values: this rank's weights and, for those in half precision, the master weights."""

    def __init__(self, weights: CoreWeights, optimizer: Any) -> None:
        self._live = weights.live
        parts = optimizer_parts(optimizer, weights.live) if optimizer is not None else {}
        self._masters = {name: part for name, part in parts.items() if part.master.dtype != self._live[name].dtype}

    def zero(self, name: str) -> None:
        """Zero a weight: padded rows, and a head that is not stored, stay 0."""
        self._live[name].zero_()
        if name in self._masters:
            self._masters[name].master.zero_()

    def copy(self, name: str, piece: Piece, values: torch.Tensor) -> None:
        """Copy a piece (rows of a weight) into the weight, and into the elements that the master weight contains."""
        place = self._live[name][piece.place]
        place.copy_(values)
        part = self._masters.get(name)
        if part is None:
            return
        first = piece.place[0].start * self._live[name][0].numel()
        own = overlap(range(first, first + place.numel()), range(part.start, part.start + part.master.numel()))
        if own:
            flat = values.reshape(-1)[own.start - first : own.stop - first]
            part.master.view(-1)[own.start - part.start : own.stop - part.start].copy_(flat)


def load_weights(
    weights: CoreWeights,
    model: str | os.PathLike | nn.Module,
    hf_config: Any,
    trust_remote_code: bool = False,
    optimizer: Any = None,
) -> None:
    """Load from a folder, a hub name, or a model in memory (that of each node's leader). A collective.

    No rank holds the whole model, unless the folder has no safetensors files. Master weights in Core's `optimizer`
    receive the unrounded values.
    """
    targets = _Targets(weights, optimizer)
    if not isinstance(model, nn.Module) and _load_from_folder(weights, targets, Path(model), optimizer is not None):
        return
    if weights.requires_safetensors and not isinstance(model, nn.Module):
        raise ValueError(
            f"model.path: {model} has no safetensors files of this model, which Megatron-Bridge requires. Set "
            "megatron_config.use_mbridge=False."
        )
    node = groups.node_group()
    source: nn.Module | None = None
    with groups.raise_on_all_ranks():
        if node.is_leader and isinstance(model, nn.Module):
            source = model
        elif node.is_leader:
            logger.info("%s: no safetensors files; one rank of each node loads the whole model.", model)
            trains = optimizer is not None
            source = pretrained_model(str(model), hf_config, weights.kind, trust_remote_code, trains)
    _load_from_module(weights, targets, source, node)


@torch.no_grad()
def _load_from_folder(weights: CoreWeights, targets: _Targets, folder: Path, trains: bool) -> bool:
    """Read this rank's slices; return False, without effect, if the folder has no safetensors files of the model.

    A missing value head, or head of a trained classifier, is initialised to 0. A collective.
    """
    files = HFFiles(folder) if folder.is_dir() else None
    new_head = weights.kind == "value" or (trains and weights.kind == "sequence_classification")
    naming = None if files is None else _naming(weights, files, new_head)
    if groups.max_over_ranks(int(naming is None), weights.device):
        return False
    assert files is not None
    assert naming is not None
    with groups.raise_on_all_ranks():
        for name in weights.live:
            stored = naming[name]
            targets.zero(name)
            for piece, values in weights.read(name, files, stored=stored) if stored is not None else ():
                targets.copy(name, piece, values)
    return True


def _naming(weights: CoreWeights, files: HFFiles, new_head: bool) -> dict[str, bool | None] | None:
    """Return for every weight whether the files name its tensors as on disk (True) or as in memory (False).

    True if both names are equal, see `CoreWeight.stored`. The value is None for a missing head; the result is None if
    another weight is missing.
    """
    naming: dict[str, bool | None] = {}
    for name, weight in weights.table.items():
        matches = [stored for stored in (True, False) if _has(files, weight, stored)]
        if not matches and not (new_head and name.startswith("score.")):
            return None
        naming[name] = matches[0] if matches else None
    return naming


def _has(files: HFFiles, weight: CoreWeight, stored: bool) -> bool:
    """Return whether the files contain a weight under these names. ValueError if shapes differ from the config."""
    fused = not (stored and weight.stored)
    expected = [files.name_of(name) for name in (weight.hf if fused else weight.stored)]
    names = [name for name in expected if name is not None]
    if len(names) < len(expected):
        return False
    shapes = [files.shape(name) for name in names]
    rows = sum(shape[-len(weight.shape)] for shape in shapes)
    if (rows, *shapes[0][len(shapes[0]) - len(weight.shape) + 1 :]) != weight.shape:
        raise ValueError(
            f"model.path: {', '.join(names)} have shapes {shapes}, but the config requires {list(weight.shape)}."
        )
    return True


@torch.no_grad()
def _load_from_module(
    weights: CoreWeights, targets: _Targets, module: nn.Module | None, node: groups.NodeGroup
) -> None:
    """Load from the model in memory of each node's leader, which broadcasts it in buckets. A collective."""
    state: Mapping[str, torch.Tensor] = module.state_dict() if module is not None else {}
    dtypes = [{name: value.dtype for name, value in state.items()}]
    dist.broadcast_object_list(dtypes, src=node.leader, group=node.group)
    own: dict[str, list[tuple[str, Piece]]] = {}
    for name in weights.live:
        targets.zero(name)
        for piece in weights.pieces(name):
            own.setdefault(piece.hf, []).append((name, piece))
    shapes = {name: spec.shape for name, spec in weights.manifest.items() if weights.first_name(name) == name}
    sizes = ((name, dtypes[0][name].itemsize * torch.Size(shape).numel()) for name, shape in shapes.items())
    for bucket in bucketed(sizes, _BUCKET_BYTES):
        for name, tensor in _broadcast(bucket, shapes, dtypes[0], state, node, weights.device):
            for core_name, piece in own.get(name, ()):
                targets.copy(core_name, piece, tensor[piece.source])


def _broadcast(
    bucket: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    state: Mapping[str, torch.Tensor],
    node: groups.NodeGroup,
    device: torch.device,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a bucket on every rank of the node."""
    if len(node.ranks) == 1:
        yield from ((name, state[name]) for name in bucket)
        return
    for dtype in dict.fromkeys(dtypes[name] for name in bucket):
        names = [name for name in bucket if dtypes[name] == dtype]
        sizes = [torch.Size(shapes[name]).numel() for name in names]
        flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        if node.is_leader:
            for name, place in zip(names, flat.split(sizes), strict=True):
                place.copy_(state[name].flatten())
        dist.broadcast(flat, src=node.leader, group=node.group)
        yield from ((name, part.view(shapes[name])) for name, part in zip(names, flat.split(sizes), strict=True))
