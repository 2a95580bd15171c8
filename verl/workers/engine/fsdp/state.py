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
from verl.workers.engine.common.checkpoint_compatibility import ModelDescription, model_info, require_fit
from verl.workers.engine.common.engine_checkpoint import StateSnapshot, extra_state, restore_extra
from verl.workers.engine.common.hf_export import HFExport
from verl.workers.engine.common.offload import local_shard
from verl.workers.engine.common.optim import LossScale, restore_schedule
from verl.workers.engine.common.sharded_checkpoint import load_tensors, save_tensors, stored_tensors
from verl.workers.engine.fsdp.optimizer import ShardedAdamW
from verl.workers.engine.fsdp.weights import ModelWeights


@dataclass(frozen=True)
class FSDPState:
    """Implements `CheckpointState` for an FSDPEngine."""

    hf: nn.Module
    model_info: Mapping[str, Any]
    """Contents of `model.json`."""
    weights: ModelWeights
    optimizer: ShardedAdamW | None
    loss_scale: LossScale
    device: torch.device
    source: str
    """Folder or hub name of the original model."""

    def snapshot(self, contents: Collection[str]) -> StateSnapshot:
        """Return the live tensors and a copy of all small state. A collective."""
        weights = self._weights_for(contents)
        moments = self.optimizer.tensors() if "optimizer" in contents and self.optimizer is not None else {}
        extra: dict[str, Any] = {}
        if "extra" in contents:
            step = self.optimizer.schedule.last_epoch if self.optimizer is not None else 0
            extra = extra_state(step, self.loss_scale, self.device)
        return StateSnapshot(contents, weights, moments, extra, self._description().model_info)

    def sizes(self, contents: Collection[str]) -> list[int]:
        """See `CheckpointState.sizes`."""
        weights = [local_shard(value).nbytes for value in self._weights_for(contents).values()]
        return weights + (self.optimizer.sizes() if "optimizer" in contents and self.optimizer is not None else [])

    def _weights_for(self, contents: Collection[str]) -> Mapping[str, torch.Tensor]:
        if "hf_model" in contents:
            return self.weights.local_tensors()
        return self.weights.stored() if "model" in contents else {}

    def write(
        self, snapshot: StateSnapshot, folder: Path, export: HFExport | None, group: dist.ProcessGroup | None
    ) -> None:
        """See `CheckpointState.write`."""
        contents = snapshot.contents
        with groups.raise_on_all_ranks(group), ChecksumRecorder(folder) as recorder:
            if "model" in contents:
                trained = self.weights.trained(snapshot.weights)
                save_tensors(trained, folder / "model", recorder, group)
                self.weights.write_adapter(trained, folder / ADAPTER_FOLDER, self.source, group)
            if "optimizer" in contents and self.optimizer is not None:
                save_tensors(snapshot.moments, folder / "optimizer", recorder, group)
            # Rank 0 writes its own files after the last collective: if that fails, no other rank waits in a collective.
            if dist.get_rank() == 0:
                snapshot.write_unsharded(recorder)
        if export is not None:
            gather = self.weights.gather_on_rank0(snapshot.weights, export.dtype, group)
            export.write(gather, folder / "huggingface", group)

    def check_fits(self, folder: Path, contents: Collection[str]) -> None:
        """See `CheckpointState.check_fits`."""
        require_fit(folder, contents, self._description())

    def load(self, folder: Path, contents: Collection[str]) -> None:
        """See `CheckpointState.load`."""
        if "model" in contents:
            load_tensors(self.weights.stored(), folder / "model")
        if "optimizer" in contents and self.optimizer is not None:
            stored = set(stored_tensors(folder / "optimizer"))
            load_tensors(self.optimizer.allocate_state(stored), folder / "optimizer")
        if "extra" in contents:
            step = restore_extra(folder, self.loss_scale, self.device)
            if self.optimizer is not None:
                restore_schedule(self.optimizer.schedule, self.optimizer.adamw, step)

    def _description(self) -> ModelDescription:
        return ModelDescription.from_model(self.hf, self.weights.stored(), self.model_info)


def expected_model(path: str, kind: ModelKind, model_config: Any) -> ModelDescription:
    """Describe the model at the local `path` as a training FSDPEngine would have it, without loading weights."""
    config = read_config(path, model_config.trust_remote_code, model_config.override_config)
    hf = empty_model(config, kind, torch.float32, model_config.trust_remote_code)
    adapters = Adapters(hf, kind, model_config) if model_config.lora_rank > 0 else None
    stored = ModelWeights(hf, adapters, torch.device("meta")).stored()
    return ModelDescription.from_model(
        hf, stored, model_info(config, kind, None if adapters is None else adapters.settings())
    )
