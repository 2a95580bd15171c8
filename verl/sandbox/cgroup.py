"""Kernel accounting of runs: memory (kernel memory included) and processes, by cgroup v2 or v1.

A zygote creates one cgroup, with a child for each run: beside the cgroup that the zygote is in (v2, where a cgroup with
children has no processes) or inside it (v1, in the hierarchies `memory` and `pids`), if that is permitted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

_PREFIX = "verl-sandbox-"
_CONTROLLERS = ("memory", "pids")
_REMOVE_SECONDS = 1.0
# Kernel memory of a run that has just started, and inexact counting per processor.
_RESERVE_BYTES = 8 << 20
# The largest allocation (a huge page). If one fails because of the limit, the recorded maximum of memory usage is below
# the limit by less than this.
_LARGEST_ALLOCATION = 2 << 20


@dataclass(frozen=True, slots=True)
class _FileNames:
    """Names of the files of a cgroup, in version 1 or 2."""

    version: int
    procs: str
    memory_max: str
    swap_max: str
    memory_current: str
    kills: str
    """File with the counter `oom_kill` of killed processes, including those killed because the machine had no memory
    left."""
    limit_reached: str
    """v2: file with the counter `oom` of allocations that failed because of this cgroup's limit. v1: file with the
    maximum memory usage, because recent kernels do not increase `memory.failcnt`."""
    pids_max: str = "pids.max"


V1 = _FileNames(
    1,
    "tasks",  # moves a single thread, without the lock over all of the machine's processes that cgroup.procs takes
    "memory.limit_in_bytes",
    "memory.memsw.limit_in_bytes",  # memory and swap together
    "memory.usage_in_bytes",
    "memory.oom_control",
    "memory.max_usage_in_bytes",
)
V2 = _FileNames(2, "cgroup.procs", "memory.max", "memory.swap.max", "memory.current", "memory.events", "memory.events")


class RunCgroup:
    """The cgroup of one run. Its descriptors stay usable after the process has dropped root and changed its root."""

    def __init__(self, files: _FileNames, folders: list[int]) -> None:
        """`folders`: descriptors of the memory controller's and then, in v1, of the pids controller's folder."""
        memory, pids = folders[0], folders[-1]
        self._files = files
        self._procs = [os.open(files.procs, os.O_WRONLY, dir_fd=folder) for folder in folders]
        self._memory_max = os.open(files.memory_max, os.O_WRONLY, dir_fd=memory)
        self._current = os.open(files.memory_current, os.O_RDONLY, dir_fd=memory)
        self._kills = os.open(files.kills, os.O_RDONLY, dir_fd=memory)
        self._limit_reached = os.open(files.limit_reached, os.O_RDONLY, dir_fd=memory)
        self._limit = 0
        self._pids_max = os.open(files.pids_max, os.O_WRONLY, dir_fd=pids)
        try:
            self._swap_max: int | None = os.open(files.swap_max, os.O_WRONLY, dir_fd=memory)
        except FileNotFoundError:  # swap is not counted, or there is none
            self._swap_max = None
        with contextlib.suppress(FileNotFoundError):  # v2 only: kill all processes of the run together
            group = os.open("memory.oom.group", os.O_WRONLY, dir_fd=memory)
            os.write(group, b"1")
            os.close(group)

    def enter(self) -> None:
        """Move this process, which has one thread, into the cgroup."""
        for descriptor in self._procs:
            os.write(descriptor, b"0")

    def limit(self, memory_bytes: int, processes: int) -> None:
        """Set the limits; `memory_bytes` is in addition to what the waiting run uses already."""
        current = int(os.pread(self._current, 64, 0))
        self._limit = current + memory_bytes + _RESERVE_BYTES
        limit = str(self._limit).encode()
        os.write(self._memory_max, limit)
        if self._swap_max is not None:
            os.write(self._swap_max, limit if self._files.version == 1 else b"0")
        os.write(self._pids_max, str(processes).encode())

    def out_of_memory(self) -> bool:
        """Whether the kernel has killed a process because of this cgroup's limit, not because the machine, or a cgroup
        above this one, had no memory left."""
        if not _counter(self._kills, b"oom_kill"):
            return False
        if self._files.version == 2:
            return _counter(self._limit_reached, b"oom") > 0
        return int(os.pread(self._limit_reached, 64, 0)) >= self._limit - _LARGEST_ALLOCATION

    def close(self) -> None:
        """Close the descriptors; the cgroup stays."""
        descriptors = [*self._procs, self._memory_max, self._current, self._kills, self._limit_reached, self._pids_max]
        for descriptor in [*descriptors, *([] if self._swap_max is None else [self._swap_max])]:
            os.close(descriptor)


class CgroupParent:
    """The cgroup of a zygote, whose children are the cgroups of its runs. OSError if it cannot be created."""

    def __init__(self) -> None:
        self.files, parents = _find_parents()
        self._name = ""
        self._lock = -1
        self._parents = [os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in parents]
        try:
            self._remove_stale()
            self._folders = list(self._create())
        except OSError as error:
            self.close()
            raise OSError(error.errno, f"{parents[0]}: {os.strerror(error.errno or 0)}") from error

    @property
    def version(self) -> int:
        return self.files.version

    def create(self, name: str) -> None:
        """Create the cgroup of one run."""
        for folder in self._folders:
            os.mkdir(name, dir_fd=folder)

    def open(self, name: str) -> RunCgroup:
        folders = [os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder) for folder in self._folders]
        try:
            return RunCgroup(self.files, folders)
        finally:
            for folder in folders:
                os.close(folder)

    def remove(self, name: str) -> bool:
        """Remove the cgroup of a run; False if some of its processes have not ended yet."""
        return all([_rmdir(name, folder) for folder in self._folders])

    def close(self) -> None:
        """Remove the cgroup; kill processes that are left in it."""
        if self._lock >= 0:
            for parent in self._parents:
                _remove_tree(self._name, parent)
            os.close(self._lock)
            self._lock = -1
        for folder in (*self._parents, *getattr(self, "_folders", ())):
            os.close(folder)
        self._parents, self._folders = [], []

    def _create(self) -> Iterator[int]:
        """Create and lock the cgroup, so that other zygotes do not remove it as stale; yield its folders."""
        while self._lock < 0:
            self._name = _PREFIX + secrets.token_hex(8)
            os.mkdir(self._name, dir_fd=self._parents[0])
            lock = _try_lock(self._name, self._parents[0])
            if lock is not None and os.fstat(lock).st_nlink == 0:  # another zygote has removed it as stale
                os.close(lock)
                lock = None
            self._lock = -1 if lock is None else lock
        for parent in self._parents[1:]:
            os.mkdir(self._name, dir_fd=parent)
        for parent in self._parents:
            folder = os.open(self._name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=parent)
            yield folder
            if self.version == 2:
                _write("cgroup.subtree_control", " ".join(f"+{name}" for name in _CONTROLLERS), folder)

    def _remove_stale(self) -> None:
        """Remove cgroups of killed zygotes: their lock is free."""
        for name in os.listdir(self._parents[0]):
            lock = _try_lock(name, self._parents[0]) if name.startswith(_PREFIX) else None
            if lock is not None:
                for parent in self._parents:
                    _remove_tree(name, parent)
                os.close(lock)


def _find_parents() -> tuple[_FileNames, list[str]]:
    """The cgroup version in use, and the folders in which to create a cgroup with the controllers."""
    cgroups: dict[str, str] = {}  # of this process, by controller; "": v2
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        for line in file:
            _, names, path = line.rstrip("\n").split(":", 2)
            cgroups.update(dict.fromkeys(names.split(","), path))
    mounts = _mounts()
    if "memory" in cgroups:
        missing = [name for name in _CONTROLLERS if name not in mounts or name not in cgroups]
        if missing:
            raise OSError(errno.ENOENT, f"the cgroup hierarchy {missing[0]} is not mounted")
        return V1, [_cgroup_path(mounts[name], cgroups[name]) for name in _CONTROLLERS]
    if "" not in cgroups or "" not in mounts:
        raise OSError(errno.ENOENT, "no cgroup file system is mounted")
    own_path = _cgroup_path(mounts[""], cgroups[""])
    parent = os.path.dirname(own_path) if own_path != mounts[""][1] else own_path
    with open(f"{parent}/cgroup.subtree_control", encoding="utf-8") as file:
        enabled = file.read().split()
    for name in _CONTROLLERS:
        if name not in enabled:
            raise OSError(errno.ENOENT, f"{parent} does not pass the {name} controller to its children")
    return V2, [parent]


def _mounts() -> dict[str, tuple[str, str]]:
    """(root, mount point) of the mounted hierarchies by controller; "": v2."""
    mounts: dict[str, tuple[str, str]] = {}
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            kind, _, options = after.split()[:3]
            root, point = before.split()[3:5]
            if kind == "cgroup2":
                mounts.setdefault("", (root, point))
            elif kind == "cgroup":
                for name in options.split(","):
                    mounts.setdefault(name, (root, point))
    return mounts


def _cgroup_path(mount: tuple[str, str], path: str) -> str:
    """The path of a cgroup in the file system."""
    root, point = mount
    inner = os.path.relpath(path, root)
    if inner.startswith(".."):
        raise OSError(errno.ENOENT, "this process's cgroup is outside of the mounted hierarchy")
    return os.path.normpath(os.path.join(point, inner))


def _try_lock(name: str, parent: int) -> int | None:
    """A descriptor that holds the lock of a cgroup; None if another process holds it."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=parent)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_tree(name: str, parent: int) -> None:
    """Remove a cgroup and its children; kill their processes."""
    try:
        folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=parent)
    except OSError:
        return
    try:
        for child in os.listdir(folder):
            if os.path.isdir(f"/proc/self/fd/{folder}/{child}"):
                deadline = time.monotonic() + _REMOVE_SECONDS
                while not _rmdir(child, folder) and time.monotonic() < deadline:
                    _kill_processes(child, folder)
                    time.sleep(0.001)
    finally:
        os.close(folder)
    _rmdir(name, parent)


def _kill_processes(name: str, parent: int) -> None:
    with contextlib.suppress(OSError), open(os.open(f"{name}/cgroup.procs", os.O_RDONLY, dir_fd=parent)) as file:
        for pid in file.read().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _counter(descriptor: int, name: bytes) -> int:
    """A number by name from a file of a cgroup; 0 if old kernels do not have it."""
    fields = os.pread(descriptor, 4096, 0).split()
    return int(fields[fields.index(name) + 1]) if name in fields else 0


def _rmdir(name: str, parent: int) -> bool:
    try:
        os.rmdir(name, dir_fd=parent)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _write(name: str, text: str, folder: int) -> None:
    descriptor = os.open(name, os.O_WRONLY, dir_fd=folder)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
