"""What a node's own memory holds: its processes, what waits there offloaded, batches, and checkpoints on their way.

Weights are read from mapped files, which the system takes back when it needs the memory: loading holds nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from verl.planning.costs import TrainedModel
from verl.planning.megatron import CoreModel
from verl.planning.phases import GB, HOST_PARTS, PhaseMemory

# Measured: a rank with torch and a device's driver (2.7 GB beyond its imports), one without; the controller and Ray.
_RANK = {"cuda": int(3.5 * GB), "cpu": int(0.6 * GB)}
_CONTROLLER = int(2.0 * GB)
# Of a token of a batch: its columns, in the store, at the controller and where they are used.
_TOKEN = 300
# Page-locked buffers through which a rank's state comes from its device.
_STAGING = 2**28
PlannedModel: TypeAlias = "TrainedModel | CoreModel"


@dataclass(frozen=True)
class HostMemory:
    """What a node has to give, and whether files in the folder of checkpoints take of it, too."""

    total: int
    holds_files: bool = False
    installed: int | None = None
    """Bytes of memory that the node, or its container, has in all; None: unknown."""
    used: int = 0
    """Bytes of it that running processes hold."""


@dataclass(frozen=True)
class Held:
    """One role's model, on `ranks` ranks of a node."""

    model: PlannedModel
    ranks: int
    param_offload: bool = False
    optimizer_offload: bool = False
    saved: tuple[str, ...] = ()
    """Contents of its checkpoints; none of a frozen one."""
    snapshot: bool | None = None
    """Whether they are copied here and written behind the next step; None: where there is room."""
    missing: float = 0.0
    """Bytes that a copy lacks, for which there is none."""

    def offloaded(self) -> float:
        """Page-locked from the first time on. On a CPU nothing is elsewhere."""
        model = self.model
        parts = (
            (self.param_offload, model.weights()),
            (self.optimizer_offload, model.moments()),
            (model.grad_offload, model.gradients()),
        )
        return self.ranks * sum(size for away, size in parts if away) if model.device == "cuda" else 0.0

    def resident(self) -> float:
        """Weights and moments of ranks whose device is the host."""
        return self.ranks * (self.model.weights() + self.model.moments()) if self.model.device == "cpu" else 0.0

    def copy(self) -> float:
        """What a checkpoint holds, of all ranks."""
        model = self.model
        weights = 4 * model.learning / model.shards if "model" in self.saved else 0.0
        moments = model.moments() if "optimizer" in self.saved else 0.0
        return self.ranks * ((model.weights() if "hf_model" in self.saved else weights) + moments)

    def copies(self) -> float:
        """Tensors on their way to a file: a whole one of the exported model on the first rank, and on every rank what
        comes from a device; without a copy of all, the largest tensor and the one after it."""
        if not self.saved:
            return 0.0
        largest = self.model.shape.embedding_parameters
        export = float(self.model.compute_bytes * largest) if "hf_model" in self.saved else 0.0
        if self.model.device == "cpu":
            return export
        return export + self.ranks * (_STAGING if self.snapshot else 2 * 4 * largest / self.model.shards)

    def files(self) -> float:
        """What a checkpoint of it takes."""
        model = self.model
        weights = 4 * model.learning if "model" in self.saved else 0
        moments = model.moments() * model.shards if "optimizer" in self.saved else 0
        export = model.compute_bytes * model.shape.parameters if "hf_model" in self.saved else 0
        return weights + moments + export


HostPhases = Callable[[Sequence[Held]], list[PhaseMemory]]


def with_snapshots(held: Sequence[Held], phases: HostPhases) -> list[Held]:
    """Each of them with a copy of its checkpoints or without; those that leave it open get one in turn, while all
    `phases` fit."""
    settled = [replace(role, snapshot=bool(role.snapshot)) for role in held]
    for index, role in enumerate(held):
        if role.snapshot is None and role.saved:
            settled[index] = replace(role, snapshot=True)
            missing = max(phase.excess for phase in phases(settled))
            if missing:
                settled[index] = replace(role, snapshot=False, missing=missing)
    return settled


def host_phases(
    ranks: int, tokens: int, kept_steps: int, host: HostMemory | None, prefix: str, held: Sequence[Held]
) -> list[PhaseMemory]:
    """Of a node with `ranks` processes: training, and saving one more of `kept_steps` checkpoints; `tokens` are those
    of a step's batch."""
    base = dict.fromkeys(HOST_PARTS, 0.0)
    base["processes"] = float(ranks * max(_RANK[role.model.device] for role in held) + _CONTROLLER)
    base["models"] = sum(role.resident() for role in held)
    base["offloaded"] = sum(role.offloaded() for role in held)
    base["batches"] = float(tokens * _TOKEN)
    base["snapshot"] = sum(role.copy() for role in held if role.snapshot)
    saving = {
        "copies": sum(role.copies() for role in held),
        "files": kept_steps * sum(role.files() for role in held) if host and host.holds_files else 0.0,
    }
    room = host.total if host else None
    return [
        PhaseMemory(f"{prefix}train", "host", base, room),
        PhaseMemory(f"{prefix}save_checkpoint", "host", base | saving, room),
    ]


def holds_files(folder: str) -> bool:
    """Whether files in that folder (which need not exist) are kept in memory: a tmpfs."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return False
    place = os.path.realpath(os.path.expanduser(folder))
    found = [line.split()[1:3] for line in mounts.read_text().splitlines()]
    inside = [(len(at), kind) for at, kind in found if at == "/" or place == at or place.startswith(f"{at}/")]
    return max(inside, default=(0, ""))[1] in ("tmpfs", "ramfs")
