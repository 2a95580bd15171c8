"""What a node's own memory holds: its processes, what waits there offloaded, batches, and a checkpoint on its way.

Weights are read from mapped files, which the system takes back when it needs the memory: loading holds nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verl.planning.costs import TrainedModel
from verl.planning.phases import GB, HOST_PARTS, PhaseMemory

# Measured: a rank with torch and a device's driver (2.7 GB beyond its imports), one without; the controller and Ray.
_RANK = {"cuda": int(3.5 * GB), "cpu": int(0.6 * GB)}
_CONTROLLER = int(2.0 * GB)
# Of a token of a batch: its columns, in the store, at the controller and where they are used.
_TOKEN = 300


@dataclass(frozen=True)
class HostMemory:
    """What a node has to give, and whether files in the folder of checkpoints take of it, too."""

    total: int
    holds_files: bool = False


@dataclass(frozen=True)
class Held:
    """One role's model, on `ranks` ranks of a node."""

    model: TrainedModel
    ranks: int
    param_offload: bool = False
    optimizer_offload: bool = False
    saved: tuple[str, ...] = ()
    """Contents of its checkpoints; none of a frozen one."""

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

    def export(self) -> float:
        """The whole model, gathered by the first rank for transformers."""
        return float(self.model.compute_bytes * self.model.shape.parameters) if "hf_model" in self.saved else 0.0

    def copies(self) -> float:
        """Tensors on their way to a file, one after the other on every rank: the largest and the one after it."""
        if not self.saved or self.model.device == "cpu":
            return 0.0
        return self.ranks * 2 * 4 * self.model.shape.embedding_parameters / self.model.shards

    def files(self) -> float:
        """What a checkpoint of it takes."""
        model = self.model
        weights = 4 * model.learning if "model" in self.saved else 0
        moments = model.moments() * model.shards if "optimizer" in self.saved else 0
        return weights + moments + self.export()


def host_phases(
    held: Sequence[Held], ranks: int, tokens: int, kept_steps: int, host: HostMemory | None, prefix: str = ""
) -> list[PhaseMemory]:
    """Of a node with `ranks` processes: training, and saving one more of `kept_steps` checkpoints; `tokens` are those
    of a step's batch."""
    base = dict.fromkeys(HOST_PARTS, 0.0)
    base["processes"] = float(ranks * max(_RANK[role.model.device] for role in held) + _CONTROLLER)
    base["models"] = sum(role.resident() for role in held)
    base["offloaded"] = sum(role.offloaded() for role in held)
    base["batches"] = float(tokens * _TOKEN)
    saving = {
        "export": sum(role.export() for role in held),
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
