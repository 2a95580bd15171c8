"""The state of an FSDPEngine in a checkpoint: written in shards, read on any number of ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from verl.models.loading import ModelKind, empty_model, read_config
from verl.models.lora import ADAPTER_FOLDER, Adapters
from verl.utils.checkpoint.manifest import ChecksumRecorder
from verl.workers.engine.common import groups
from verl.workers.engine.common.checkpoint_compatibility import ModelDescription, about, differences
from verl.workers.engine.common.engine_checkpoint import Frozen, extra_state, restore_extra
from verl.workers.engine.common.hf_export import HFExport
from verl.workers.engine.common.offload import local_shard
from verl.workers.engine.common.optim import LossScale, restore_schedule
from verl.workers.engine.common.sharded_checkpoint import load_tensors, save_tensors, stored_tensors
from verl.workers.engine.fsdp.optimizer import ShardedAdamW
from verl.workers.engine.fsdp.weights import ModelWeights


@dataclass(frozen=True)
class EngineState:
    """The parts of an engine that change as it learns; they are on their device while they are loaded."""

    hf: nn.Module
    about: Mapping[str, Any]
    """What `model.json` says of the model."""
    weights: ModelWeights
    optimizer: ShardedAdamW | None
    loss_scale: LossScale
    device: torch.device
    source: str
    """Where the model was loaded from."""

    def freeze(self, contents: Collection[str]) -> Frozen:
        """The live tensors, and a copy of all that is small. A collective."""
        weights = self._weights_of(contents)
        moments = self.optimizer.tensors() if "optimizer" in contents and self.optimizer is not None else {}
        extra: dict[str, Any] = {}
        if "extra" in contents:
            step = self.optimizer.schedule.last_epoch if self.optimizer is not None else 0
            extra = extra_state(step, self.loss_scale, self.device)
        return Frozen(contents, weights, moments, extra, self._description().about)

    def sizes(self, contents: Collection[str]) -> list[int]:
        """Bytes that this rank holds of each tensor of such a checkpoint, with all moments. No collective."""
        weights = [local_shard(value).nbytes for value in self._weights_of(contents).values()]
        return weights + (self.optimizer.sizes() if "optimizer" in contents and self.optimizer is not None else [])

    def _weights_of(self, contents: Collection[str]) -> Mapping[str, torch.Tensor]:
        if "hf_model" in contents:
            return self.weights.everything()
        return self.weights.stored() if "model" in contents else {}

    def write(self, frozen: Frozen, folder: Path, export: HFExport | None, group: dist.ProcessGroup | None) -> None:
        """All files of a checkpoint; a collective of `group`. Reads nothing of the engine that changes."""
        contents = frozen.contents
        with groups.failing_together(group), ChecksumRecorder(folder) as recorder:
            if "model" in contents:
                trained = self.weights.trained(frozen.weights)
                save_tensors(trained, folder / "model", recorder, group)
                self.weights.write_adapter(trained, folder / ADAPTER_FOLDER, self.source, group)
            if "optimizer" in contents and self.optimizer is not None:
                save_tensors(frozen.moments, folder / "optimizer", recorder, group)
            # What rank 0 writes alone comes after the last collective: where it fails, the others are not inside one.
            if dist.get_rank() == 0:
                frozen.write_alone(recorder)
        if export is not None:
            export.write(self.weights.whole(frozen.weights, export.dtype, group), folder / "huggingface", group)

    def check_fits(self, folder: Path, contents: Collection[str]) -> None:
        """Raise ValueError for a checkpoint of another model, before anything is read."""
        different = differences(folder, contents, self._description())
        if different:
            raise ValueError(f"{folder} does not fit this model: {'; '.join(different)}.")

    def load(self, folder: Path, contents: Collection[str]) -> None:
        """Read back what `save` wrote."""
        if "model" in contents:
            load_tensors(self.weights.stored(), folder / "model")
        if "optimizer" in contents and self.optimizer is not None:
            stored = set(stored_tensors(folder / "optimizer"))
            load_tensors(self.optimizer.prepare(stored), folder / "optimizer")
        if "extra" in contents:
            step = restore_extra(folder, self.loss_scale, self.device)
            if self.optimizer is not None:
                restore_schedule(self.optimizer.schedule, self.optimizer.adamw, step)

    def _description(self) -> ModelDescription:
        """What a checkpoint must fit."""
        return ModelDescription.of(self.hf, self.weights.stored(), self.about)


def expected_model(path: str, kind: ModelKind, model_config: Any) -> ModelDescription:
    """Of the model at the local `path` as a trained FSDPEngine would have it, with `model_config`'s adapters."""
    config = read_config(path, model_config.trust_remote_code, model_config.override_config)
    hf = empty_model(config, kind, torch.float32, model_config.trust_remote_code)
    adapters = Adapters(hf, kind, model_config) if model_config.lora_rank > 0 else None
    stored = ModelWeights(hf, adapters, torch.device("meta")).stored()
    return ModelDescription.of(hf, stored, about(config, kind, None if adapters is None else adapters.about()))
