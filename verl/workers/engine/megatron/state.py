"""The state of a MegatronEngine in a checkpoint: chunks of Hugging Face tensors, in files that every engine reads.

Core's own distributed checkpoints use Core's names for weights, and buffer positions for a sharded optimizer: other
engines cannot read them, and they cannot be written during training from a copy. Therefore weights and moments are
written under Hugging Face names by the ranks that hold them, and can be loaded on any layout and by the FSDP engine.
Checkpoints of the FSDP engine can be loaded by this engine.
"""

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
from verl.workers.engine.common.checkpoint_compatibility import ModelDescription, require_fit
from verl.workers.engine.common.engine_checkpoint import StateSnapshot, extra_state, restore_extra
from verl.workers.engine.common.hf_export import HFExport
from verl.workers.engine.common.optim import MOMENTS, LossScale, restore_schedule
from verl.workers.engine.common.sharded_checkpoint import Chunk, load_chunks, save_chunks, stored_tensors
from verl.workers.engine.megatron.optimizer import OptimizerPart, copy_masters_to_weights, optimizer_parts
from verl.workers.engine.megatron.weights import CoreWeights


@dataclass(frozen=True)
class MegatronState:
    """Implements `CheckpointState` for a MegatronEngine."""

    skeleton: nn.Module
    """The Hugging Face model on the meta device."""
    model_info: Mapping[str, Any]
    """Contents of `model.json`."""
    weights: CoreWeights
    chunks: Sequence[Any]
    """Model chunks, in Core's DistributedDataParallel if they are trained."""
    optimizer: Any
    """Core's optimizer; None for a frozen model."""
    schedules: Sequence[LambdaLR]
    loss_scale: LossScale
    device: torch.device

    @cached_property
    def _parts(self) -> dict[str, OptimizerPart]:
        """This rank's parts of the optimizer state, by Core's names."""
        return optimizer_parts(self.optimizer, self.weights.live) if self.optimizer is not None else {}

    def snapshot(self, contents: Collection[str]) -> StateSnapshot:
        """Return the live tensors and a copy of all small state. A collective."""
        weights = self._weights_for(contents)
        moments: dict[str, torch.Tensor] = {}
        if "optimizer" in contents:
            for name, part in self._parts.items():
                moments |= {f"{name}/{key}": value for key, value in part.moments().items()}
        extra: dict[str, Any] = {}
        if "extra" in contents:
            step = self.schedules[0].last_epoch if self.schedules else 0
            extra = extra_state(step, self.loss_scale, self.device)
        return StateSnapshot(contents, weights, moments, extra, self._description.model_info)

    def sizes(self, contents: Collection[str]) -> list[int]:
        """See `CheckpointState.sizes`."""
        sizes = [value.nbytes for value in self._weights_for(contents).values()]
        if "optimizer" in contents:
            sizes += [size for part in self._parts.values() for size in (4, *[part.master.nbytes] * len(MOMENTS))]
        return sizes

    def _weights_for(self, contents: Collection[str]) -> dict[str, torch.Tensor]:
        """Return this rank's shards for an export or a frozen model; for a trained model also master weights, except
        those with the same values as a shard that is returned."""
        weights: dict[str, torch.Tensor] = {}
        if "hf_model" in contents:
            weights |= {name: value.detach() for name, value in self.weights.live.items()}
        if "model" in contents and self.optimizer is not None:
            masters = {name: part.master.detach() for name, part in self._parts.items()}
            weights |= {
                f"{name}/master": value
                for name, value in masters.items()
                if name not in weights or weights[name].dtype != value.dtype
            }
        elif "model" in contents:
            weights |= {name: value.detach() for name, value in self.weights.live.items()}
        return weights

    def write(
        self, snapshot: StateSnapshot, folder: Path, export: HFExport | None, group: dist.ProcessGroup | None
    ) -> None:
        """See `CheckpointState.write`."""
        contents = snapshot.contents
        with groups.raise_on_all_ranks(group), ChecksumRecorder(folder) as recorder:
            if "model" in contents:
                save_chunks(self._weight_chunks(snapshot.weights), folder / "model", recorder, group)
            if "optimizer" in contents and self.optimizer is not None:
                save_chunks(self._moment_chunks(snapshot.moments), folder / "optimizer", recorder, group)
            # Rank 0 writes its own files after the last collective: if that fails, no other rank waits in a collective.
            if dist.get_rank() == 0:
                snapshot.write_unsharded(recorder)
        if export is not None:
            gather = self.weights.gather_on_rank0(snapshot.weights, export.dtype, group)
            export.write(gather, folder / "huggingface", group)

    def _weight_chunks(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[Chunk]:
        for name in self.weights.live:
            part = self._parts.get(name)
            if (self._parts and part is None) or not self._writes(name):
                continue
            values, start = tensors.get(f"{name}/master"), part.start if part is not None else 0
            if values is None:
                size = part.master.numel() if part is not None else tensors[name].numel()
                values = tensors[name].view(-1)[start : start + size]
            yield from self.weights.chunks(name, values, start)

    def _moment_chunks(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[Chunk]:
        """Yield this rank's moments; the rank with the first element of a tensor also writes the number of steps."""
        for name, part in self._parts.items():
            if not self._writes(name) or f"{name}/step" not in tensors:
                continue
            for key in MOMENTS:
                for chunk in self.weights.chunks(name, tensors[f"{name}/{key}"], part.start):
                    yield Chunk(f"{chunk.name}/{key}", chunk.shape, chunk.offsets, chunk.tensor)
                    if key == MOMENTS[0] and not any(chunk.offsets):
                        yield Chunk(f"{chunk.name}/step", (), (), tensors[f"{name}/step"])

    def _writes(self, name: str) -> bool:
        """Return whether this rank writes the weight: true on one of the ranks that hold the same elements."""
        part = self._parts.get(name)
        sharded = part is not None and part.sharded
        return self.weights.writes(name) and (sharded or self.weights.copy_number(name) == 0)

    def check_fits(self, folder: Path, contents: Collection[str]) -> None:
        """See `CheckpointState.check_fits`."""
        require_fit(folder, contents, self._description)

    @torch.no_grad()
    def load(self, folder: Path, contents: Collection[str]) -> None:
        """See `CheckpointState.load`. A collective, with the layout active."""
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
            values.zero_()  # padded rows
        load_chunks((chunk for name, at in held.items() for chunk in self.weights.chunks(name, *at)), folder)
        if self.optimizer is not None:
            copy_masters_to_weights(self.optimizer, self.chunks)

    def _load_moments(self, folder: Path) -> None:
        stored = stored_tensors(folder)
        counters = {name: f"{self.weights.table[name].hf[0]}/step" for name in self._parts}
        steps = {counter: torch.zeros(()) for counter in counters.values() if counter in stored}
        load_chunks((Chunk(name, (), (), value) for name, value in steps.items()), folder)
        chunks: list[Chunk] = []
        for name, part in self._parts.items():
            part.clear_state()
            if counters[name] not in steps:
                continue
            moments = part.allocate_moments(float(steps[counters[name]]))
            for key, values in moments.items():
                chunks += [
                    Chunk(f"{chunk.name}/{key}", chunk.shape, chunk.offsets, chunk.tensor)
                    for chunk in self.weights.chunks(name, values, part.start)
                ]
        load_chunks(chunks, folder)

    @cached_property
    def _description(self) -> ModelDescription:
        state = self.skeleton.state_dict()
        stored = {name: value for name, value in state.items() if self.weights.first_name(name) == name}
        return ModelDescription.from_model(self.skeleton, stored, self.model_info)


def is_core_checkpoint(folder: Path) -> bool:
    """Return whether Megatron-Core wrote the checkpoint (by `dist_checkpointing`), not `MegatronState.write`."""
    return folder.is_dir() and bool(dist_checkpointing.check_is_distributed_checkpoint(str(folder)))


@torch.no_grad()
def load_core_weights(models: Sequence[Any], optimizer: Any, folder: Path) -> None:
    """Load a checkpoint of Core into the model chunks, and into the master weights of `optimizer`, if given.

    Core's own loader unpickles `.metadata`, `common.pt` and objects in data files. Here, `load_chunks` reads only
    tensors, into the layout that Core describes. A collective, with the layout active. ValueError for missing weights.
    """
    parts = {f"model{number}": model.sharded_state_dict() for number, model in enumerate(models)}
    prepared, _, factories = load_preprocess(parts)
    tensors, _ = extract_matching_values(prepared, lambda value: isinstance(value, ShardedTensor))
    _read_tensors(list(nested_values(tensors)), folder)
    dict_list_map_inplace(lambda tensor: tensor.data, tensors)
    loaded = apply_factory_merges(tensors, factories)
    for number, model in enumerate(models):
        missing = model.load_state_dict(loaded[f"model{number}"], strict=False).missing_keys
        _raise_if_missing(folder, {name for name in missing if not name.endswith("_extra_state")})
    if optimizer is not None:
        optimizer.reload_model_params()


def _read_tensors(tensors: Sequence[ShardedTensor], folder: Path) -> None:
    """Read the tensors' data in place."""
    stored = stored_tensors(folder)
    _raise_if_missing(folder, {tensor.key for tensor in tensors if tensor.key not in stored})
    chunks = [chunk for tensor in tensors if (chunk := _chunk(tensor, stored[tensor.key])) is not None]
    first = {chunk.key: chunk for chunk in reversed(chunks)}
    load_chunks(first.values(), folder)
    for chunk in chunks:  # weights that two model chunks share
        if chunk is not first[chunk.key]:
            chunk.tensor.copy_(first[chunk.key].tensor)


def _chunk(tensor: ShardedTensor, stored: TensorSpec) -> Chunk | None:
    """Return this rank's part of the stored tensor; None if the part is only vocabulary padding."""
    data = tensor.data.view((1,) * tensor.prepend_axis_num + tuple(tensor.local_shape))
    shape = tuple(tensor.global_shape)
    if tensor.allow_shape_mismatch and len(stored.shape) == len(shape):
        shape = stored.shape
        for dim, (offset, total) in enumerate(zip(tensor.global_offset, shape, strict=True)):
            data = data.narrow(dim, 0, max(0, min(data.shape[dim], total - offset)))
    return Chunk(tensor.key, shape, tuple(tensor.global_offset), data) if data.numel() else None


def _raise_if_missing(folder: Path, names: set[str]) -> None:
    if names:
        raise ValueError(
            f"dist_checkpointing_path: {folder} has no {', '.join(sorted(names)[:4])} ({len(names)} missing weights). "
            "Use a checkpoint of this model."
        )
