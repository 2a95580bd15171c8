"""What a run may use, what came of it, and what keeps it from everything else."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["finished", "error", "timeout", "memory", "output", "refused"]
REQUIRE = ("none", "files", "network", "full")
"""Levels of isolation, weakest first; each includes those before it."""


class IsolationMissing(RuntimeError):
    """This host cannot isolate as much as `require` asks for."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run, with all the processes that it starts, may use."""

    wall_s: float = 10.0
    """Seconds until it is killed; of a session: of each cell."""
    cpu_s: float | None = None
    """Processor seconds of each process; None: `wall_s` and one more (a session: no limit)."""
    memory_mb: int = 1024
    """Memory of all its processes together, page tables and kernel buffers included; of private memory, one process
    cannot even reserve more."""
    file_mb: int = 64
    """What it may write into its directories, in all and in one file."""
    processes: int = 64
    """Processes and threads."""
    output_bytes: int = 1 << 20
    """stdout and stderr together; as much again for all fetched files together. What is beyond is dropped."""
    compile_s: float = 30.0
    """Seconds for the compiler, where the language has one."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not value > 0:
                raise ValueError(f"sandbox limit {name}={value}: must be more than 0")

    def processor_seconds(self) -> int:
        return math.ceil(self.wall_s + 1 if self.cpu_s is None else self.cpu_s)


@dataclass(slots=True)
class Result:
    """How a program ended.

    `finished`: by itself with return code 0. `error`: with another, or by a signal (return code -signal). `timeout`:
    of the wall or the processor. `memory`: killed for it (return code -9), or it ran into the limit and ended by
    itself (another code). `output`: finished, but stdout and stderr or a fetched file were cut. `refused`: never run.
    """

    status: Status
    return_code: int | None = None
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    compile: Result | None = None
    files: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Isolation:
    """What stands between a run and the rest of the machine."""

    namespaces: bool = False  # own users, mounts, processes, network, IPC
    landlock: int = 0  # its ABI; 0: not there
    seccomp: bool = False  # dangerous system calls are refused
    cgroup: int = 0  # version of the cgroups that count memory and processes; 0: the keeper counts them
    missing: tuple[str, ...] = ()  # what this host lacks, in words

    @property
    def files(self) -> bool:
        """It sees its own directory and the installed programs; the user's files are out of reach."""
        return self.namespaces or self.landlock > 0

    @property
    def network(self) -> bool:
        return self.namespaces or self.seccomp

    @property
    def level(self) -> str:
        """The highest of `REQUIRE` that is met."""
        if not self.files:
            return "none"
        if not self.network:
            return "files"
        return "full" if self.namespaces and self.seccomp else "network"

    def check(self, require: str) -> None:
        """IsolationMissing, in words, where `require` is more than this."""
        if require not in REQUIRE:
            raise ValueError(f"sandbox.require={require!r}: one of {', '.join(REQUIRE)}")
        if REQUIRE.index(self.level) < REQUIRE.index(require):
            raise IsolationMissing(
                f"sandbox.require={require}, but this host only offers {self.level!r}: {'; '.join(self.missing)}. "
                "Allow user namespaces or Landlock to this process (in Docker: a seccomp profile that lets `unshare`, "
                "`mount` and `landlock_*` pass), use a sandbox server elsewhere (sandbox_fusion.url), or, if the code "
                f"may do all that this user may, set sandbox.require={self.level}."
            )

    def __str__(self) -> str:
        parts = [
            *(["namespaces"] if self.namespaces else []),
            *([f"Landlock ABI {self.landlock}"] if self.landlock else []),
            *(["seccomp"] if self.seccomp else []),
            *([f"cgroup v{self.cgroup}"] if self.cgroup else []),
        ]
        return f"level {self.level} ({', '.join(parts) or 'resource limits only'})"
