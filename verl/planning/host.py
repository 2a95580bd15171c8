"""What a node's own memory holds: its processes, weights being loaded, what waits offloaded, and a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verl.planning.costs import TrainedModel
from verl.planning.phases import GB, HOST_PARTS, PhaseMemory

# Measured: a rank with torch and a device's driver, without one, and the controller with Ray's own processes.
_RANK = {"cuda": int(3.0 * GB), "cpu": int(0.6 * GB)}
_CONTROLLER = int(2.0 * GB)
# Of a token of a batch: its columns, in the store, at the controller and where they are used.
_TOKEN = 300
_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class Held:
    """One role's model, on `ranks` ranks of a node."""

    model: TrainedModel
    ranks: int
    param_offload: bool = False
    optimizer_offload: bool = False
    saved: tuple[str, ...] = ()
    """Contents of its checkpoints; none of a frozen one."""

    def offloaded(self, trained: bool = True) -> float:
        """Page-locked from the first time on; moments and gradients come with the first step. None on a CPU."""
        model = self.model
        parts = (
            (self.param_offload, model.weights()),
            (self.optimizer_offload and trained, model.moments()),
            (model.grad_offload and trained, model.gradients()),
        )
        return self.ranks * sum(size for away, size in parts if away) if model.device == "cuda" else 0.0

    def resident(self) -> float:
        """Weights and moments of ranks whose device is the host."""
        return self.ranks * (self.model.weights() + self.model.moments()) if self.model.device == "cpu" else 0.0

    def stored(self) -> float:
        """The model's own files as they are read: by one rank of a node, which hands shards to the others."""
        return float(self.model.shape.stored_bytes * self.model.shape.parameters)

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


@dataclass(frozen=True)
class Node:
    """A machine with `ranks` processes of a run."""

    device: str
    ranks: int
    checkpoints: str
    """The folder they go to."""
    tokens: int
    """Of a step's batch."""
    loaded_by_rollout: float = 0.0
    """What its engines read for themselves."""
    room: int | None = None

    def phases(self, held: Sequence[Held], prefix: str = "") -> list[PhaseMemory]:
        """Loading, training and saving of these models."""
        base = dict.fromkeys(HOST_PARTS, 0.0)
        base["processes"] = float(self.ranks * _RANK[self.device] + _CONTROLLER)
        base["models"] = sum(role.resident() for role in held)
        offloaded = sum(role.offloaded() for role in held)
        loading = max([self.loaded_by_rollout, *(role.stored() for role in held)])
        batches = float(self.tokens * _TOKEN)
        phases = {
            "load": {"offloaded": sum(role.offloaded(trained=False) for role in held), "loading": loading},
            "train": {"offloaded": offloaded, "batches": batches},
            "save_checkpoint": {
                "offloaded": offloaded,
                "batches": batches,
                "export": sum(role.export() for role in held),
                "copies": sum(role.copies() for role in held),
                "files": sum(role.files() for role in held) if in_memory(self.checkpoints) else 0.0,
            },
        }
        return [PhaseMemory(prefix + name, "host", base | parts, self.room) for name, parts in phases.items()]


def in_memory(folder: str) -> bool:
    """Whether files in that folder (which need not exist) are kept in the host's memory."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return False
    place = os.path.realpath(os.path.expanduser(folder))
    found = [line.split()[1:3] for line in mounts.read_text().splitlines()]
    inside = [(len(at), kind) for at, kind in found if at == "/" or place == at or place.startswith(f"{at}/")]
    return max(inside, default=(0, ""))[1] in _IN_MEMORY
