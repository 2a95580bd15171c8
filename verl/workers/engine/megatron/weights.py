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

from verl.models.core.architecture import CoreArchitecture
from verl.models.core.flat_ranges import rectangles
from verl.models.core.weight_map import CoreWeight, Piece, shard_slices, weight_map
from verl.models.loading import ModelKind
from verl.types.weights import Manifest, TensorSpec, Wanted
from verl.workers.engine.common.sharded_checkpoint import Chunk
from verl.workers.engine.common.weights import bucketed
from verl.workers.engine.megatron.gathering import Copy, Found, Held, Strip, common, exchanged, on_first_rank, spread
from verl.workers.engine.megatron.layout import CoreLayout
from verl.workers.engine.megatron.layout import Part as Place


class CoreWeights:
    """Of one engine. Making one is a collective, with the layout active."""

    only_files = False
    """Whether it is filled from safetensors files or a model in memory alone, not from what transformers loads."""

    def __init__(
        self,
        chunks: Sequence[tuple[nn.Module, Mapping[str, str]]],
        layout: CoreLayout,
        arch: CoreArchitecture,
        kind: ModelKind,
        skeleton: nn.Module,
        device: torch.device,
    ) -> None:
        """`chunks`: this rank's modules, each with its parameters' names in the whole model; `skeleton`: transformers'
        model on the meta device."""
        self._layout, self._arch = layout, arch
        self.kind: ModelKind = kind
        self.device = device
        self.table = {weight.name: weight for weight in weight_map(arch, kind)}
        self.live = {whole: module.get_parameter(name) for module, names in chunks for name, whole in names.items()}
        self._tied = {"lm_head.weight": "model.embed_tokens.weight"} if arch.tied and kind == "causal_lm" else {}
        self._shapes = {name: tuple(value.shape) for name, value in skeleton.state_dict().items()}
        self._check_shapes()
        dtypes: list[dict[str, torch.dtype]] = [{} for _ in range(dist.get_world_size())]
        own = {hf: value.dtype for name, value in self.live.items() for hf in self.table[name].hf}
        dist.all_gather_object(dtypes, own)
        self._dtypes = {name: dtype for each in dtypes for name, dtype in each.items()}
        self._dense, self._experts = self._copies(lambda weight: weight)

    @cached_property
    def manifest(self) -> Manifest:
        """Of every weight shape and type; tied ones under each of their names."""
        return {name: TensorSpec(shape, self._dtypes[self.first(name)]) for name, shape in self._shapes.items()}

    def first(self, name: str) -> str:
        """Of a tied weight the first name."""
        return self._tied.get(name, name)

    def buckets(self, dtype: torch.dtype | None, max_bytes: int, wanted: Sequence[Wanted] | None) -> Iterator[Found]:
        """See `TrainEngine.buckets`."""
        kinds = _kinds(wanted)
        strips = self._strips(dtype, max_bytes, wanted)
        for bucket in bucketed(((strip, strip.size) for strip in strips), max_bytes):
            yield self._bucket(bucket, kinds, wanted, max_bytes)

    def _strips(self, dtype: torch.dtype | None, max_bytes: int, wanted: Sequence[Wanted] | None) -> list[Strip]:
        """What is handed over, in the order of the manifest."""
        kinds, strips = _kinds(wanted), list[Strip]()
        for name, spec in self.manifest.items():
            if wanted is not None and not any(name in each for each in kinds):
                continue
            target = dtype if dtype is not None and spec.dtype.is_floating_point else spec.dtype
            strip = Strip(name, spec.shape, target, range(spec.shape[0]))
            strips += [strip] if wanted is None or strip.size <= max_bytes else strip.cut(max_bytes)
        return strips

    def _bucket(
        self, strips: Sequence[Strip], kinds: Sequence[Wanted], wanted: Sequence[Wanted] | None, max_bytes: int
    ) -> Found:
        found: Found = {}
        for copy in (self._dense, self._experts):
            own = [strip for strip in strips if strip.name in copy.held]
            # None: everybody wants everything.
            whole = [strip for strip in own if all(len(strip.wanted_by(each)) == len(strip.rows) for each in kinds)]
            found |= spread(whole, copy, self.live, self.device)
            rest = [strip for strip in own if strip not in whole]
            if wanted is not None and rest:
                found |= exchanged(rest, copy, self.live, self.device, wanted, max_bytes)
        # In the order of the manifest, as other engines give them.
        order = {strip.name: at for at, strip in enumerate(strips)}
        return dict(
            sorted(found.items(), key=lambda item: order[item[0] if isinstance(item[0], str) else item[0].name])
        )

    def everything(self) -> Mapping[str, torch.Tensor]:
        """This rank's shards as they are now, under Core's names."""
        return self.live

    def whole(
        self, everything: Mapping[str, torch.Tensor], dtype: torch.dtype, group: dist.ProcessGroup | None
    ) -> Callable[[str], torch.Tensor | None]:
        """By the name of a weight: all of it, in host memory of rank 0 alone. A collective.

        `everything`: these shards, or what they were at some time.
        """

        def of(name: str) -> torch.Tensor | None:
            copy = self._dense if name in self._dense.held else self._experts
            target = dtype if self.manifest[name].dtype.is_floating_point else self.manifest[name].dtype
            return on_first_rank(name, self._shapes[name], copy, everything, target, group)

        return of

    def pieces(self, name: str, *, stored: bool = False) -> list[Piece]:
        """Of which slices this rank's shard of Core's weight `name` is made; `stored`: under their names on disk."""
        weight = self.table[name]
        place = self._place(weight)
        return shard_slices(weight, self._arch, place.rank, place.size, stored=stored)

    def read(self, name: str, files: HFFiles, *, stored: bool) -> Iterator[tuple[Piece, torch.Tensor]]:
        """This rank's shard of Core's weight `name` out of Hugging Face files, piece by piece."""
        for piece in self.pieces(name, stored=stored):
            yield piece, files.read(piece.hf, piece.source)

    def chunks(self, name: str, values: torch.Tensor, start: int = 0) -> Iterator[Chunk]:
        """`values`, elements of this rank's shard of Core's weight `name` from `start` on, as rectangles by Hugging
        Face name that share its memory. Padding of the vocabulary is in none."""
        flat = values.detach().view(-1)
        for piece in self.pieces(name):
            box = _box(piece.source)
            rows, width = piece.place[0], len(box[-1]) if len(piece.place) > 1 else 1
            mine = common(range(rows.start * width, rows.stop * width), range(start, start + len(flat)))
            for part in rectangles(width, mine.start, mine.stop):
                first = part.rows.start * width + part.columns.start - start
                down = box[-len(piece.place)].start + part.rows.start - rows.start
                across = (box[-1].start + part.columns.start,) if len(piece.place) > 1 else ()
                experts = (box[0].start,) if len(box) > len(piece.place) else ()
                shape = (*(1 for _ in experts), len(part.rows), *(len(part.columns) for _ in across))
                count = len(part.rows) * len(part.columns)
                view = flat[first : first + count].view(shape)
                yield Chunk(piece.hf, self._shapes[piece.hf], (*experts, down, *across), view)

    def writes(self, name: str) -> bool:
        """Whether this rank writes Core's weight `name`, of those that hold the same part of it within one copy."""
        weight = self.table[name]
        return weight.copy_of is None and (weight.split is not None or self._place(weight).rank == 0)

    def copy_number(self, name: str) -> int:
        """Which of several copies of the weight this rank's is part of."""
        return (self._layout.dp_cp if self.table[name].expert is None else self._layout.expert_dp).rank

    def _place(self, weight: CoreWeight) -> Place:
        return self._layout.tp if weight.expert is None else self._layout.etp

    def _copies(self, seen: Callable[[CoreWeight], CoreWeight]) -> tuple[Copy, Copy]:
        """Who holds what outside experts, and in them, of the tensors that weights are made of as they are `seen`."""
        of_experts = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
        return (
            self._copy(parallel_state.get_model_parallel_group(), self._layout.tp, False, seen),
            self._copy(of_experts, self._layout.etp, True, seen),
        )

    def _copy(
        self, group: dist.ProcessGroup, place: Place, experts: bool, seen: Callable[[CoreWeight], CoreWeight]
    ) -> Copy:
        """Who in `group` holds what; a collective of it."""
        ranks = tuple(dist.get_process_group_ranks(group))
        own = [name for name in self.live if (self.table[name].expert is not None) == experts]
        told: list[Any] = [None] * len(ranks)
        dist.all_gather_object(told, (place.rank, {_key(self.table[name]) for name in own}), group=group)
        held: dict[str, list[Held]] = {}
        for weight in self.table.values():
            if (weight.expert is not None) != experts or weight.copy_of is not None:
                continue
            for owner, (part, keys) in enumerate(told):
                if _key(weight) in keys and (weight.split is not None or part == 0):
                    for piece in shard_slices(seen(weight), self._arch, part, place.size):
                        held.setdefault(piece.hf, []).append(Held(owner, weight.name, piece.place, _box(piece.source)))
        held |= {name: held[first] for name, first in self._tied.items() if first in held}
        return Copy(group, ranks, held)

    def _check_shapes(self) -> None:
        for name, value in self.live.items():
            weight = self.table[name]
            expected = weight.shard_shape(self._place(weight).size)
            assert tuple(value.shape) == expected, f"{name}: {tuple(value.shape)}, not {expected}"


def _kinds(wanted: Sequence[Wanted] | None) -> list[Wanted]:
    """Those that are not the same object."""
    return list({id(each): each for each in wanted or ()}.values())


def _key(weight: CoreWeight) -> tuple[Any, int | None]:
    """What ranks tell each other of what they hold: stages and experts, not every name."""
    return weight.stage, weight.expert


def _box(source: Sequence[int | slice]) -> tuple[range, ...]:
    return tuple(range(at, at + 1) if isinstance(at, int) else range(at.start, at.stop) for at in source)


class HFFiles:
    """The safetensors files of a folder, of which slices are read."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._files = [safe_open(file, framework="pt") for file in sorted(folder.glob("*.safetensors"))]

    @cached_property
    def _names(self) -> dict[str, Any]:
        return {name: file for file in self._files for name in file.keys()}

    def name_of(self, name: str) -> str | None:
        """As it is stored: a bare model's weights have no prefix."""
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
