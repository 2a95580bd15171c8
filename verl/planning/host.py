"""Host memory of a node: processes, offloaded state, batches, and checkpoints that are being written.

Loading models counts as 0: weights are read from memory-mapped files, whose pages the kernel can reclaim.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from verl.planning.fsdp import FSDPModelMemory
from verl.planning.megatron import MegatronModelMemory
from verl.planning.phases import GB, HOST_PARTS, PhaseMemory

# Measured: a rank with torch and the driver of a device (2.7 GB beyond its imports), one without; controller and Ray.
_RANK = {"cuda": int(3.5 * GB), "cpu": int(0.6 * GB)}
_CONTROLLER = int(2.0 * GB)
# Bytes per token of a batch: its columns in the object store, in the controller and in the workers.
_TOKEN = 300
# Page-locked buffers through which the state of a rank is copied from its device.
_STAGING = 2**28
ModelMemory: TypeAlias = "FSDPModelMemory | MegatronModelMemory"


@dataclass(frozen=True)
class HostMemory:
    """Memory of a node."""

    total: int
    """Bytes available to the run."""
    checkpoints_in_memory: bool = False
    """Whether the checkpoint folder is on a tmpfs, so that its files use this memory."""
    installed: int | None = None
    """Total bytes of the node, or of its container; None: unknown."""
    used: int = 0
    """Bytes in use by running processes."""


@dataclass(frozen=True)
class HostedModel:
    """The model of one role on `ranks` ranks of a node; its host memory."""

    model: ModelMemory
    ranks: int
    param_offload: bool = False
    optimizer_offload: bool = False
    save_contents: tuple[str, ...] = ()
    """Contents of its checkpoints; empty for a frozen model."""
    snapshot: bool | None = None
    """Whether checkpoints are copied to host memory and written in the background; None: if the memory suffices."""
    missing: float = 0.0
    """Bytes of host memory that are missing for a snapshot."""

    def offloaded(self) -> float:
        """Page-locked buffers of offloaded state, which stay allocated; 0 for ranks on CPUs."""
        model = self.model
        parts = (
            (self.param_offload, model.weights()),
            (self.optimizer_offload, model.moments()),
            (model.grad_offload, model.gradients()),
        )
        return self.ranks * sum(size for offloads, size in parts if offloads) if model.device == "cuda" else 0.0

    def resident(self) -> float:
        """Weights and moments of ranks on CPUs."""
        return self.ranks * (self.model.weights() + self.model.moments()) if self.model.device == "cpu" else 0.0

    def snapshot_bytes(self) -> float:
        """A copy of the checkpoint contents of all ranks."""
        model = self.model
        weights = 4 * model.trained_parameters / model.shards if "model" in self.save_contents else 0.0
        moments = model.moments() if "optimizer" in self.save_contents else 0.0
        return self.ranks * ((model.weights() if "hf_model" in self.save_contents else weights) + moments)

    def write_buffers(self) -> float:
        """Buffers for writing a checkpoint: one unsharded tensor of the exported model on the first rank, and on every
        rank the staging buffers of a snapshot, or, without a snapshot, the two largest tensors."""
        if not self.save_contents:
            return 0.0
        largest = self.model.shape.embedding_parameters
        export = float(self.model.compute_bytes * largest) if "hf_model" in self.save_contents else 0.0
        if self.model.device == "cpu":
            return export
        return export + self.ranks * (_STAGING if self.snapshot else 2 * 4 * largest / self.model.shards)

    def file_bytes(self) -> float:
        """Size of the checkpoint files of all ranks."""
        model = self.model
        weights = 4 * model.trained_parameters if "model" in self.save_contents else 0
        moments = model.moments() * model.shards if "optimizer" in self.save_contents else 0
        export = model.compute_bytes * model.shape.parameters if "hf_model" in self.save_contents else 0
        return weights + moments + export


HostPhases = Callable[[Sequence[HostedModel]], list[PhaseMemory]]


def decide_snapshots(models: Sequence[HostedModel], phases: HostPhases) -> list[HostedModel]:
    """Return the models with `snapshot` resolved: if it is None, it is enabled as long as all `phases` fit."""
    decided = [replace(model, snapshot=bool(model.snapshot)) for model in models]
    for index, model in enumerate(models):
        if model.snapshot is None and model.save_contents:
            decided[index] = replace(model, snapshot=True)
            missing = max(phase.excess for phase in phases(decided))
            if missing:
                decided[index] = replace(model, snapshot=False, missing=missing)
    return decided


def host_phases(
    ranks: int, tokens: int, kept_steps: int, host: HostMemory | None, prefix: str, models: Sequence[HostedModel]
) -> list[PhaseMemory]:
    """Return the host phases of a node with `ranks` processes: training, and saving a checkpoint.

    `tokens`: tokens of the batch of a step; `kept_steps`: checkpoints that exist at the same time, including the new
    one; `prefix`: of the names of the phases.
    """
    base = dict.fromkeys(HOST_PARTS, 0.0)
    base["processes"] = float(ranks * max(_RANK[model.model.device] for model in models) + _CONTROLLER)
    base["models"] = sum(model.resident() for model in models)
    base["offloaded"] = sum(model.offloaded() for model in models)
    base["batches"] = float(tokens * _TOKEN)
    base["snapshot"] = sum(model.snapshot_bytes() for model in models if model.snapshot)
    in_memory = host is not None and host.checkpoints_in_memory
    saving = {
        "copies": sum(model.write_buffers() for model in models),
        "files": kept_steps * sum(model.file_bytes() for model in models) if in_memory else 0.0,
    }
    capacity = host.total if host else None
    return [
        PhaseMemory(f"{prefix}train", "host", base, capacity),
        PhaseMemory(f"{prefix}save_checkpoint", "host", base | saving, capacity),
    ]


def is_in_memory(folder: str) -> bool:
    """Whether files in a folder, which need not exist, are in memory (tmpfs)."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return False
    path = os.path.realpath(os.path.expanduser(folder))
    mount_points = [line.split()[1:3] for line in mounts.read_text().splitlines()]
    containing = [(len(at), kind) for at, kind in mount_points if at == "/" or path == at or path.startswith(f"{at}/")]
    return max(containing, default=(0, ""))[1] in ("tmpfs", "ramfs")
