"""The state of a MegatronEngine in a checkpoint, in files that every engine reads."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from verl.types.weights import TensorSpec
from verl.utils.checkpoint.manifest import ChecksumRecorder
from verl.workers.engine.common import groups
from verl.workers.engine.common.checkpoint_compatibility import ModelDescription, differences
from verl.workers.engine.common.engine_checkpoint import Frozen, extra_state, restore_extra
from verl.workers.engine.common.hf_export import HFExport
from verl.workers.engine.common.optim import MOMENTS, LossScale, restore_schedule
from verl.workers.engine.common.sharded_checkpoint import Chunk, load_chunks, save_chunks, stored_tensors
from verl.workers.engine.megatron.optimizer import OptimizerPart, optimizer_parts, publish
from verl.workers.engine.megatron.weights import CoreWeights


@dataclass(frozen=True)
class CoreState:
    """The parts of an engine that change as it learns; they are on their device while they are loaded."""

    skeleton: nn.Module
    """transformers' model on the meta device."""
    about: Mapping[str, Any]
    """What `model.json` says of the model."""
    weights: CoreWeights
    chunks: Sequence[Any]
    """Core's modules, as the optimizer has them."""
    optimizer: Any
    """Core's; None of a frozen model."""
    schedules: Sequence[LambdaLR]
    loss_scale: LossScale
    device: torch.device

    @cached_property
    def _parts(self) -> dict[str, OptimizerPart]:
        """What learns on this rank, by Core's name."""
        return optimizer_parts(self.optimizer, self.weights.live) if self.optimizer is not None else {}

    def freeze(self, contents: Collection[str]) -> Frozen:
        """The live tensors, and a copy of all that is small. A collective."""
        weights = self._weights_of(contents)
        moments: dict[str, torch.Tensor] = {}
        if "optimizer" in contents:
            for name, part in self._parts.items():
                moments |= {f"{name}/{key}": value for key, value in part.moments().items()}
        extra: dict[str, Any] = {}
        if "extra" in contents:
            step = self.schedules[0].last_epoch if self.schedules else 0
            extra = extra_state(step, self.loss_scale, self.device)
        return Frozen(contents, weights, moments, extra, self._description.about)

    def sizes(self, contents: Collection[str]) -> list[int]:
        """Bytes that this rank holds of each tensor of such a checkpoint, with all moments. No collective."""
        found = [value.nbytes for value in self._weights_of(contents).values()]
        if "optimizer" in contents:
            found += [size for part in self._parts.values() for size in (4, *[part.master.nbytes] * len(MOMENTS))]
        return found

    def _weights_of(self, contents: Collection[str]) -> dict[str, torch.Tensor]:
        """Whole shards for an export; masters, of which each rank has a part, where that does not hold them."""
        found: dict[str, torch.Tensor] = {}
        if "hf_model" in contents:
            found |= {name: value.detach() for name, value in self.weights.live.items()}
        if "model" in contents and self.optimizer is not None:
            masters = {name: part.master.detach() for name, part in self._parts.items()}
            found |= {
                f"{name}/master": value
                for name, value in masters.items()
                if name not in found or found[name].dtype != value.dtype
            }
        elif "model" in contents:
            found |= {name: value.detach() for name, value in self.weights.live.items()}
        return found

    def write(self, frozen: Frozen, folder: Path, export: HFExport | None, group: dist.ProcessGroup | None) -> None:
        """All files of a checkpoint; a collective of `group`. Reads nothing of the engine that changes."""
        contents = frozen.contents
        with groups.failing_together(group), ChecksumRecorder(folder) as recorder:
            if "model" in contents:
                save_chunks(self._weight_chunks(frozen.weights), folder / "model", recorder, group)
            if "optimizer" in contents and self.optimizer is not None:
                save_chunks(self._moment_chunks(frozen.moments), folder / "optimizer", recorder, group)
            # What rank 0 writes alone comes after the last collective: where it fails, the others are not inside one.
            if dist.get_rank() == 0:
                frozen.write_alone(recorder)
        if export is not None:
            export.write(self.weights.whole(frozen.weights, export.dtype, group), folder / "huggingface", group)

    def _weight_chunks(self, frozen: Mapping[str, torch.Tensor]) -> Iterator[Chunk]:
        for name in self.weights.live:
            part = self._parts.get(name)
            if (self._parts and part is None) or not self._writes(name):
                continue
            values, start = frozen.get(f"{name}/master"), part.start if part is not None else 0
            if values is None:
                size = part.master.numel() if part is not None else frozen[name].numel()
                values = frozen[name].view(-1)[start : start + size]
            yield from self.weights.chunks(name, values, start)

    def _moment_chunks(self, frozen: Mapping[str, torch.Tensor]) -> Iterator[Chunk]:
        """Of each tensor, whoever has its first element also writes the number of steps."""
        for name, part in self._parts.items():
            if not self._writes(name) or f"{name}/step" not in frozen:
                continue
            for key in MOMENTS:
                for chunk in self.weights.chunks(name, frozen[f"{name}/{key}"], part.start):
                    yield Chunk(f"{chunk.name}/{key}", chunk.shape, chunk.offsets, chunk.tensor)
                    if key == MOMENTS[0] and not any(chunk.offsets):
                        yield Chunk(f"{chunk.name}/step", (), (), frozen[f"{name}/step"])

    def _writes(self, name: str) -> bool:
        """One of all ranks that hold the same; with a sharded optimizer every copy writes its part."""
        part = self._parts.get(name)
        shared = part is not None and part.sharded
        return self.weights.writes(name) and (shared or self.weights.copy_number(name) == 0)

    def check_fits(self, folder: Path, contents: Collection[str]) -> None:
        """Raise ValueError for a checkpoint of another model, before anything is read."""
        different = differences(folder, contents, self._description)
        if different:
            raise ValueError(f"{folder} does not fit this model: {'; '.join(different)}.")

    @torch.no_grad()
    def load(self, folder: Path, contents: Collection[str]) -> None:
        """Read back what an engine saved; a collective, with the layout active."""
        if "model" in contents:
            self._load_weights(folder / "model")
        if "optimizer" in contents and self.optimizer is not None:
            self._load_moments(folder / "optimizer")
        if "extra" in contents:
            step = restore_extra(folder, self.loss_scale, self.device)
            for schedule in self.schedules:
                restore_schedule(schedule, schedule.optimizer, step)

    def _load_weights(self, folder: Path) -> None:
        held = {name: (value, 0) for name, value in self.weights.live.items()}
        if self.optimizer is not None:
            held = {name: (part.master, part.start) for name, part in self._parts.items()}
        for values, _ in held.values():
            values.zero_()  # rows of padding
        load_chunks((chunk for name, at in held.items() for chunk in self.weights.chunks(name, *at)), folder)
        if self.optimizer is not None:
            publish(self.optimizer, self.chunks)

    def _load_moments(self, folder: Path) -> None:
        stored = stored_tensors(folder)
        counters = {name: f"{self.weights.table[name].hf[0]}/step" for name in self._parts}
        steps = {counter: torch.zeros(()) for counter in counters.values() if counter in stored}
        load_chunks((Chunk(name, (), (), value) for name, value in steps.items()), folder)
        chunks: list[Chunk] = []
        for name, part in self._parts.items():
            part.forget()
            if counters[name] not in steps:
                continue
            room = part.give_moments(float(steps[counters[name]]))
            for key, values in room.items():
                chunks += [
                    Chunk(f"{chunk.name}/{key}", chunk.shape, chunk.offsets, chunk.tensor)
                    for chunk in self.weights.chunks(name, values, part.start)
                ]
        load_chunks(chunks, folder)

    @cached_property
    def _description(self) -> ModelDescription:
        """What a checkpoint must fit."""
        state = self.skeleton.state_dict()
        stored = {name: value for name, value in state.items() if self.weights.first(name) == name}
        return ModelDescription.of(self.skeleton, stored, self.about)


def is_core_checkpoint(folder: Path) -> bool:
    """Whether Core wrote it; ours has a folder of its own for the model."""
    return folder.is_dir() and bool(dist_checkpointing.check_is_distributed_checkpoint(str(folder)))


@torch.no_grad()
def load_core_weights(models: Sequence[Any], optimizer: Any, folder: Path) -> None:
    """Into the chunks of a pipeline stage, and from there into the masters of Core's `optimizer`, if there is one.

    A collective, with the layout active. ValueError for weights that are not there.
    """
    parts = {f"model{number}": model.sharded_state_dict() for number, model in enumerate(models)}
    prepared, _, factories = load_preprocess(parts)
    tensors, _ = extract_matching_values(prepared, lambda value: isinstance(value, ShardedTensor))
    _read(list(nested_values(tensors)), folder)
    dict_list_map_inplace(lambda tensor: tensor.data, tensors)
    loaded = apply_factory_merges(tensors, factories)
    for number, model in enumerate(models):
        absent = model.load_state_dict(loaded[f"model{number}"], strict=False).missing_keys
        _refuse_missing(folder, {name for name in absent if not name.endswith("_extra_state")})
    if optimizer is not None:
        optimizer.reload_model_params()


def _read(tensors: Sequence[ShardedTensor], folder: Path) -> None:
    """Fill the tensors' data, in place."""
    stored = stored_tensors(folder)
    _refuse_missing(folder, {tensor.key for tensor in tensors if tensor.key not in stored})
    chunks = [chunk for tensor in tensors if (chunk := _chunk(tensor, stored[tensor.key])) is not None]
    first = {chunk.at: chunk for chunk in reversed(chunks)}
    load_chunks(first.values(), folder)
    for chunk in chunks:  # weights that two parts of the model share
        if chunk is not first[chunk.at]:
            chunk.tensor.copy_(first[chunk.at].tensor)


def _chunk(tensor: ShardedTensor, stored: TensorSpec) -> Chunk | None:
    """Where in the stored tensor this rank's part is; None where the stored one is shorter (padded vocabularies)."""
    data = tensor.data.view((1,) * tensor.prepend_axis_num + tuple(tensor.local_shape))
    shape = tuple(tensor.global_shape)
    if tensor.allow_shape_mismatch and len(stored.shape) == len(shape):
        shape = stored.shape
        for dim, (offset, total) in enumerate(zip(tensor.global_offset, shape, strict=True)):
            data = data.narrow(dim, 0, max(0, min(data.shape[dim], total - offset)))
    return Chunk(tensor.key, shape, tuple(tensor.global_offset), data) if data.numel() else None


def _refuse_missing(folder: Path, names: set[str]) -> None:
    if names:
        raise ValueError(
            f"dist_checkpointing_path: {folder} has no {', '.join(sorted(names)[:4])} ({len(names)} weights are not "
            "there). Give a checkpoint of this model."
        )
