"""The memory plan: phases on a device or a host with their parts and capacity, and their rendering as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GB = 2**30
# The columns of the tables, in order.
DEVICE_PARTS = ("weights", "optimizer", "gradients", "gathered", "activations", "head", "rollout", "judge", "context")
HOST_PARTS = ("processes", "models", "offloaded", "snapshot", "copies", "files", "batches")
# The role that computes in each phase; phases in the order of a step.
ROLE_OF_PHASE = {
    "gen": "rollout",
    "reward": "reward_model",
    "judge": "reward_model",  # served
    "old_log_prob": "actor",
    "ref": "ref",
    "teacher": "teacher",
    "values": "critic",
    "update_critic": "critic",
    "update_actor": "actor",
}
# Fraction of torch's allocations that is lost to fragmentation.
_FRAGMENTATION = 0.03


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one rank: a GPU, or its share of host memory on a CPU."""

    kind: str
    total: int
    name: str = ""


@dataclass(frozen=True)
class PhaseMemory:
    """Peak memory of a phase by part."""

    phase: str
    pool: str
    parts: dict[str, float]
    capacity: int | None = None
    """Available bytes; None: unknown."""

    @property
    def on_host(self) -> bool:
        return "processes" in self.parts

    @property
    def allocated(self) -> float:
        """Bytes of tensors, which the metric `memory_gb/<phase>` measures."""
        return sum(size for name, size in self.parts.items() if name != "context")

    @property
    def total(self) -> float:
        """Bytes of tensors and, on a device, of its context and of fragmentation."""
        return self.allocated if self.on_host else self.parts["context"] + self.allocated * (1 + _FRAGMENTATION)

    @property
    def shown_parts(self) -> list[str]:
        """Parts that are not 0 when they are rounded to two decimals in GB."""
        return [name for name, size in self.parts.items() if size >= 0.005 * GB]

    @property
    def excess(self) -> float:
        """Bytes beyond the capacity."""
        return 0.0 if self.capacity is None else max(0.0, self.total - self.capacity)

    @property
    def location(self) -> str:
        return "the host" if self.on_host else "a device"


@dataclass(frozen=True)
class RoleMemory:
    """State of the model of one role, in bytes on each of the `ranks` of its pool."""

    role: str
    pool: str
    ranks: int
    parameters: int
    trained_parameters: int
    weights: float
    optimizer: float
    gradients: float
    """During an update."""


@dataclass(frozen=True)
class MemoryPlan:
    """All phases of a run, first those of devices, then those of hosts."""

    phases: tuple[PhaseMemory, ...]
    device: DeviceMemory | None
    snapshot_shortfall: Mapping[str, float] = field(default_factory=dict)
    """Bytes of host memory that are missing for a snapshot (copy) of the checkpoint, by config block; 0 if it fits."""
    installed: int | None = None
    """Total bytes of host memory; None: unknown."""
    used_by_others: int = 0
    """Bytes of host memory in use by other processes."""
    checkpoint: Mapping[str, float] = field(default_factory=dict)
    """Bytes of the files of one checkpoint, by config block."""
    roles: tuple[RoleMemory, ...] = ()

    @property
    def worst_phase(self) -> PhaseMemory:
        """The phase with the largest excess; if all fit, the largest phase of a device."""
        return max(self.phases, key=lambda phase: (phase.excess, not phase.on_host, phase.total))

    @property
    def excess(self) -> float:
        """Sum of the bytes by which phases exceed their capacity."""
        return sum(phase.excess for phase in self.phases)

    def limited_by_host(self, phase: PhaseMemory) -> bool:
        """Whether host memory limits a phase: a host phase, or any phase of a run on CPUs."""
        return phase.on_host or (self.device is not None and self.device.kind == "cpu")

    def fits_without_other_processes(self, phase: PhaseMemory) -> bool:
        """Whether a phase would fit if other processes used no host memory."""
        if phase.capacity is None or self.installed is None or not self.limited_by_host(phase):
            return False
        # The capacity is a fraction of the memory that other processes leave.
        return phase.total * max(0, self.installed - self.used_by_others) <= phase.capacity * self.installed

    def phase(self, name: str) -> PhaseMemory:
        """Return the phase of this name."""
        return next(phase for phase in self.phases if phase.phase == name)

    def summary(self) -> str:
        """Return one line for the log: the largest phase on a device and on a host."""
        largest = []
        for where, on_host in (("device", False), ("host", True)):
            phases = [phase for phase in self.phases if phase.on_host == on_host]
            if phases:
                phase = max(phases, key=lambda phase: phase.total)
                of = "" if phase.capacity is None else f" of {phase.capacity / GB:.1f}"
                largest.append(f"{phase.total / GB:.1f}{of} GB per {where} ({phase.phase})")
        return f"Memory plan: up to {', '.join(largest)}"

    def render(self) -> str:
        """Return tables in GB: one of devices, one of hosts."""
        capacity = "" if self.device is None else f" of {self.device.total / GB:.1f} ({self.device.name})"
        tables = [f"Memory plan: GB per device at the longest sequences{capacity}"]
        tables += _table([phase for phase in self.phases if not phase.on_host], DEVICE_PARTS)
        host = [phase for phase in self.phases if phase.on_host]
        if host:
            available = "" if host[0].capacity is None else f" of {host[0].capacity / GB:.1f} available"
            tables.append(f"Host memory: GB per node{available}")
            if self.installed is not None:
                tables[-1] += (
                    f" ({self.installed / GB:.1f} installed, {self.used_by_others / GB:.1f} used by other processes)"
                )
            tables += _table(host, HOST_PARTS)
        return "\n".join(tables)


def _table(phases: list[PhaseMemory], parts: tuple[str, ...]) -> list[str]:
    shown = [name for name in parts if any(name in phase.shown_parts for phase in phases)]
    rows = [["phase", *shown, "total"]]
    for phase in phases:
        sizes = [*(phase.parts[name] for name in shown), phase.total]
        rows.append([phase.phase, *(f"{size / GB:.2f}" for size in sizes)])
    return format_table(rows)


def format_table(rows: list[list[str]]) -> list[str]:
    """Return the lines of a table: the first column left-aligned, the others right-aligned, all indented."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(["", row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
