"""What a checkpoint holds of an FSDPEngine: written in shards, and read back also by another number of ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from verl.config.names import CHECKPOINT_CONTENTS
from verl.models.lora import ADAPTER_FOLDER
from verl.utils.checkpoint.manifest import ChecksumRecorder
from verl.workers.engine.common import checkpoint, groups
from verl.workers.engine.common.optim import LossScale, restore_schedule
from verl.workers.engine.common.same_model import ABOUT, ModelDescription, differences
from verl.workers.engine.fsdp.model_weights import ModelWeights
from verl.workers.engine.fsdp.optimizer import ShardedAdamW


def checked(path: str | os.PathLike, contents: Collection[str]) -> Path:
    """The folder of a checkpoint; ValueError for contents that there are not."""
    unknown = sorted(set(contents) - set(CHECKPOINT_CONTENTS))
    if unknown:
        raise ValueError(f"checkpoint contents: {unknown} are unknown. Use some of {', '.join(CHECKPOINT_CONTENTS)}.")
    return Path(path)


@dataclass(frozen=True)
class EngineState:
    """The parts of an engine that change as it learns; they are on their device while they are saved or loaded."""

    hf: nn.Module
    about: Mapping[str, Any]
    """What `model.json` says of the model."""
    weights: ModelWeights
    optimizer: ShardedAdamW | None
    schedule: LambdaLR | None
    loss_scale: LossScale
    device: torch.device
    source: str
    """Where the model was loaded from."""

    def save(self, folder: Path, contents: Collection[str]) -> None:
        """A collective."""
        with groups.failing_together(), ChecksumRecorder(folder) as recorder:
            if "model" in contents:
                checkpoint.save_tensors(self.weights.stored(), folder / "model", recorder)
                self.weights.write_adapter(folder / ADAPTER_FOLDER, self.source)
            if "optimizer" in contents and self.optimizer is not None:
                checkpoint.save_tensors(self.optimizer.tensors(), folder / "optimizer", recorder)
            random = checkpoint.random_states(self.device) if "extra" in contents else []
            # What rank 0 writes alone comes after the last collective: where it fails, the others are not inside one.
            if dist.get_rank() == 0:
                self._write_alone(contents, random, recorder)

    def check_fits(self, folder: Path, contents: Collection[str]) -> None:
        """Raise ValueError for a checkpoint of another model, before anything is read."""
        different = differences(folder, contents, self._description())
        if different:
            raise ValueError(f"{folder} does not fit this model: {'; '.join(different)}.")

    def load(self, folder: Path, contents: Collection[str]) -> None:
        """Read back what `save` wrote."""
        if "model" in contents:
            checkpoint.load_tensors(self.weights.stored(), folder / "model")
        if "optimizer" in contents and self.optimizer is not None:
            stored = set(checkpoint.stored_tensors(folder / "optimizer"))
            checkpoint.load_tensors(self.optimizer.prepare(stored), folder / "optimizer")
        if "extra" in contents:
            extra = torch.load(folder / "extra.pt", weights_only=True)
            if self.schedule is not None and self.optimizer is not None:
                restore_schedule(self.schedule, self.optimizer.adamw, extra["schedule_step"])
            self.loss_scale.load_state_dict(extra["loss_scale"])
            checkpoint.restore_random_state(extra["random"], self.device)

    def _write_alone(self, contents: Collection[str], random: list[dict[str, Any]], recorder: ChecksumRecorder) -> None:
        """The files of a checkpoint that are one rank's: what the model is, the schedule and the random states."""
        if "model" in contents:
            with recorder.open(ABOUT) as stream:
                stream.write(json.dumps(self._description().about, indent=1).encode())
        if "extra" in contents:
            step = self.schedule.last_epoch if self.schedule is not None else 0
            extra = {"schedule_step": step, "loss_scale": self.loss_scale.state_dict(), "random": random}
            with recorder.open("extra.pt") as stream:
                torch.save(extra, stream)

    def _description(self) -> ModelDescription:
        """What a checkpoint must fit."""
        return ModelDescription.of(self.hf, self.weights.stored(), self.about)
