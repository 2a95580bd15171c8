"""The weights of a model on Megatron-Core by Hugging Face name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from verl.models.loading import ModelKind
from verl.models.megatron_core import CoreArchitecture, CoreWeight, Piece, matrix_rectangles, shard_slices, weight_map
from verl.types.weights import Manifest, NamedRows, RequestedRows, TensorSpec, bucketed, distinct_requests, overlap
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
    ) -> Iterator[NamedRows]:
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
    ) -> NamedRows:
        requests = distinct_requests(requested)
        result: NamedRows = {}
        for copy in (self._dense, self._experts):
            in_copy = [part for part in ranges if part.name in copy.held]
            # Without requests, all ranks receive all rows.
            to_all = [
                part for part in in_copy if all(len(part.requested_by(req)) == len(part.rows) for req in requests)
            ]
            result |= gather_everywhere(to_all, copy, self.live, self.device)
            rest = [part for part in in_copy if part not in to_all]
            if requested is not None and rest:
                result |= exchange(rest, copy, self.live, self.device, requested, max_bytes)
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
        """Return whether this rank writes Core's weight `name`: true on one rank of a copy with the same part."""
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
