"""Public types of the sandbox (limits, results, isolation), its languages, and the check of file names."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["finished", "error", "timeout", "memory", "output", "refused"]
REQUIRE = ("none", "files", "network", "full")
"""Levels of isolation, weakest first; each includes those before it."""
_MAX_PATHS, _MAX_PATH_BYTES, _MAX_NAME_BYTES = 1024, 1024, 255


class IsolationMissing(RuntimeError):
    """This host cannot provide the isolation that `require` demands."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run, including all processes that it starts, may use."""

    wall_s: float = 10.0
    """Seconds until the run is killed; in a session: until a cell is interrupted."""
    cpu_s: float | None = None
    """CPU seconds of each process; None: `wall_s` + 1 (in a session: no limit)."""
    memory_mb: int = 1024
    """Memory of all processes together, including page tables and kernel buffers; also the largest amount of private
    memory that one process may reserve."""
    file_mb: int = 64
    """Size of all files that the run may write together, and of one file."""
    processes: int = 64
    """Processes and threads."""
    output_bytes: int = 1 << 20
    """Size of stdout and stderr together, and also of all fetched files together. The rest is dropped."""
    compile_s: float = 30.0
    """Seconds for the compiler, if the language has one."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not value > 0:
                raise ValueError(f"sandbox limit {name}={value}: must be more than 0")

    def cpu_seconds(self) -> int:
        """Return the limit of CPU seconds of a program."""
        return math.ceil(self.wall_s + 1 if self.cpu_s is None else self.cpu_s)


@dataclass(slots=True)
class Result:
    """How a program ended.

    `finished`: return code 0. `error`: another return code, or a signal (return code -signal). `timeout`: wall or CPU
    time. `memory`: killed for exceeding the limit (return code -9), or failed to allocate and exited (another code).
    `output`: finished, but stdout and stderr or a fetched file were truncated. `refused`: not run.
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
    """The kernel features that separate a run from the rest of the machine."""

    namespaces: bool = False  # own users, mounts, processes, network, IPC
    landlock: int = 0  # its ABI; 0: not available
    seccomp: bool = False  # system calls that programs do not need are refused
    cgroup: int = 0  # version of the cgroups that count memory and processes; 0: the supervisor counts them
    missing: tuple[str, ...] = ()  # descriptions of what this host lacks

    @property
    def files(self) -> bool:
        """Programs see only their own directory and the installed programs."""
        return self.namespaces or self.landlock > 0

    @property
    def network(self) -> bool:
        """Programs cannot use the network."""
        return self.namespaces or self.seccomp

    @property
    def level(self) -> str:
        """The highest level of `REQUIRE` that is met."""
        if not self.files:
            return "none"
        if not self.network:
            return "files"
        return "full" if self.namespaces and self.seccomp else "network"

    def check(self, require: str) -> None:
        """Raise IsolationMissing, with cause and remedy, if the level is below `require`."""
        if require not in REQUIRE:
            raise ValueError(f"sandbox.require={require!r}: one of {', '.join(REQUIRE)}")
        if REQUIRE.index(self.level) < REQUIRE.index(require):
            raise IsolationMissing(
                f"sandbox.require={require}, but this host only offers {self.level!r}: {'; '.join(self.missing)}. "
                "Allow user namespaces or Landlock to this process (in Docker: a seccomp profile that permits "
                "`unshare`, `mount` and `landlock_*`), use a sandbox server elsewhere (sandbox_fusion.url), or, if the "
                f"code may do everything that this user may, set sandbox.require={self.level}."
            )

    def __str__(self) -> str:
        parts = [
            *(["namespaces"] if self.namespaces else []),
            *([f"Landlock ABI {self.landlock}"] if self.landlock else []),
            *(["seccomp"] if self.seccomp else []),
            *([f"cgroup v{self.cgroup}"] if self.cgroup else []),
        ]
        return f"level {self.level} ({', '.join(parts) or 'resource limits only'})"


# -- languages ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Language:
    """A programming language. In commands, `{memory}` is the memory limit in MB."""

    file: str
    """Name of the file with the program."""
    tools: tuple[str, ...] = ()
    """Commands that have to be on the PATH."""
    compile: tuple[str, ...] = ()
    """Command that compiles the file; empty: none."""
    start: tuple[str, ...] = ()
    """Command that starts the program; empty: Python, which runs in a forked interpreter."""

    def missing_tool(self) -> str | None:
        """Return a required tool that is not on this machine's PATH, or None."""
        return next((tool for tool in self.tools if shutil.which(tool) is None), None)


_PYTHON = Language("main.py")
_SHELL = Language("main.sh", ("bash",), start=("bash", "main.sh"))
_CPP = Language("main.cpp", ("g++",), ("g++", "-O2", "-std=c++17", "-pipe", "-o", "main", "main.cpp"), ("./main",))
_NODE = Language("main.js", ("node",), start=("node", "--max-old-space-size={memory}", "main.js"))
LANGUAGES = {
    "python": _PYTHON,
    "shell": _SHELL,
    "bash": _SHELL,
    "sh": _SHELL,
    "cpp": _CPP,
    "c++": _CPP,
    "javascript": _NODE,
    "js": _NODE,
    "nodejs": _NODE,
}


def find_language(name: str) -> Language:
    """Return the language `name`. ValueError: it is unknown, or this machine lacks a tool for it."""
    language = LANGUAGES.get(name.lower())
    if language is None:
        raise ValueError(f"language {name!r} is not one of {', '.join(LANGUAGES)}")
    tool = language.missing_tool()
    if tool is not None:
        raise ValueError(f"language {name!r} needs {tool}, which is not on this machine's PATH")
    return language


def search_path() -> str:
    """PATH of programs in a sandbox: the folders of their tools, then the system's."""
    tools = [sys.executable, *(shutil.which(tool) or "" for tool in ("node", "g++"))]
    folders = [path.rpartition("/")[0] for path in tools if path]
    return ":".join(dict.fromkeys([*folders, "/usr/local/bin", "/usr/bin", "/bin"]))


# -- file names --------------------------------------------------------------------------------------------------


def check_paths(written: Iterable[str], fetch: Sequence[str]) -> None:
    """Raise ValueError for names of files that cannot be written to, or fetched from, a program's directory."""
    names = list(written)
    if len(names) + len(fetch) > _MAX_PATHS:
        raise ValueError(f"sandbox files: {len(names) + len(fetch)} names are more than {_MAX_PATHS}")
    for path in (*names, *fetch):
        _check_path(path)
    files = {os.path.normpath(path) for path in names}
    for path in names:
        folder = os.path.dirname(os.path.normpath(path))
        while folder:
            if folder in files:
                raise ValueError(f"sandbox file {_shortened(path)}: another file has the name of its folder")
            folder = os.path.dirname(folder)


def _check_path(path: str) -> None:
    problem = None
    try:
        parts = path.encode().split(b"/")
    except UnicodeEncodeError:
        problem = "it contains characters that are not allowed in a file name"
    else:
        if not path or path.startswith("/") or b".." in parts or "\0" in path or os.path.normpath(path) == ".":
            problem = "a path inside the program's directory is needed, without '..'"
        elif path.endswith("/"):
            problem = "it is the name of a folder"
        elif len(path.encode()) > _MAX_PATH_BYTES or max(map(len, parts)) > _MAX_NAME_BYTES:
            problem = (
                f"the path is longer than {_MAX_PATH_BYTES} bytes, or one of its parts than {_MAX_NAME_BYTES} bytes"
            )
    if problem is not None:
        raise ValueError(f"sandbox file {_shortened(path)}: {problem}")


def _shortened(path: str) -> str:
    return repr(path if len(path) <= 100 else path[:100] + "…")
