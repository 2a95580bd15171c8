"""What a plan is made of: phases, on a device or a host, each with its parts and the room there is; and their table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GB = 2**30
# The columns of the tables, in order.
DEVICE_PARTS = ("weights", "optimizer", "gradients", "gathered", "activations", "head", "rollout", "judge", "context")
HOST_PARTS = ("processes", "models", "offloaded", "snapshot", "copies", "files", "batches")
# Whose passes a phase runs, in the order of a step.
ROLE_OF_PHASE = {
    "gen": "rollout",
    "reward": "reward_model",
    "judge": "reward_model",  # the same where it answers requests
    "old_log_prob": "actor",
    "ref": "ref",
    "teacher": "teacher",
    "values": "critic",
    "update_critic": "critic",
    "update_actor": "actor",
}
# Share of what torch allocates that is lost between blocks.
_SLACK = 0.03


@dataclass(frozen=True)
class DeviceMemory:
    """What one rank may take: of a GPU, or its share of the host's memory on a CPU."""

    kind: str
    total: int
    name: str = ""


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes while a phase is at its fullest, by what they are for."""

    phase: str
    pool: str
    parts: dict[str, float]
    room: int | None = None
    """None: not known here."""

    @property
    def on_host(self) -> bool:
        return "processes" in self.parts

    @property
    def allocated(self) -> float:
        """What this process's tensors take: what `memory_gb/<phase>` will show."""
        return sum(size for name, size in self.parts.items() if name != "context")

    @property
    def total(self) -> float:
        """With a device's context, and what is lost between blocks."""
        return self.allocated if self.on_host else self.parts["context"] + self.allocated * (1 + _SLACK)

    @property
    def excess(self) -> float:
        """Bytes beyond the room."""
        return 0.0 if self.room is None else max(0.0, self.total - self.room)

    @property
    def where(self) -> str:
        return "the host" if self.on_host else "a device"


@dataclass(frozen=True)
class MemoryPlan:
    """Every phase of a run, those of its devices first."""

    phases: tuple[PhaseMemory, ...]
    device: DeviceMemory | None
    no_snapshot: Mapping[str, float] = field(default_factory=dict)
    """By block: the bytes of host memory that a copy of its checkpoints lacks; 0 where it has room."""
    installed: int | None = None
    """Bytes of memory that the host has in all; None: unknown."""
    used: int = 0
    """Bytes of host memory that other processes hold."""

    @property
    def fullest(self) -> PhaseMemory:
        """The one furthest beyond its room; of a device where all fit."""
        return max(self.phases, key=lambda phase: (phase.excess, not phase.on_host, phase.total))

    @property
    def excess(self) -> float:
        return sum(phase.excess for phase in self.phases)

    def limited_by_host(self, phase: PhaseMemory) -> bool:
        """Whether host memory limits a phase: a host phase, or any phase of a run on CPUs."""
        return phase.on_host or (self.device is not None and self.device.kind == "cpu")

    def fits_if_alone(self, phase: PhaseMemory) -> bool:
        """Whether a phase would fit if other processes held no host memory."""
        if phase.room is None or self.installed is None or not self.limited_by_host(phase):
            return False
        return phase.total * max(0, self.installed - self.used) <= phase.room * self.installed

    def phase(self, name: str) -> PhaseMemory:
        return next(phase for phase in self.phases if phase.phase == name)

    def render(self) -> str:
        """Tables for the log, in GB: one of a device, one of a host."""
        where = "" if self.device is None else f" of {self.device.total / GB:.1f} ({self.device.name})"
        tables = [f"Memory plan: GB per device at the longest sequences{where}"]
        tables += _table([phase for phase in self.phases if not phase.on_host], DEVICE_PARTS)
        host = [phase for phase in self.phases if phase.on_host]
        if host:
            room = host[0].room
            tables.append("Host memory: GB per node" + ("" if room is None else f" of {room / GB:.1f} available"))
            if self.installed is not None:
                tables[-1] += f" ({self.installed / GB:.1f} installed, {self.used / GB:.1f} used by other processes)"
            tables += _table(host, HOST_PARTS)
        return "\n".join(tables)


def _table(phases: list[PhaseMemory], parts: tuple[str, ...]) -> list[str]:
    shown = [name for name in parts if any(phase.parts[name] >= 0.005 * GB for phase in phases)]
    rows = [["phase", *shown, "total"]]
    for phase in phases:
        sizes = [*(phase.parts[name] for name in shown), phase.total]
        rows.append([phase.phase, *(f"{size / GB:.2f}" for size in sizes)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(["", row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
