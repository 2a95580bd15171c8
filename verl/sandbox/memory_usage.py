"""Memory of a run where no cgroup counts it: pages, page tables, and buffers of the kernel that the program fills."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from verl.sandbox.family import Family
from verl.sandbox.seccomp import SHARED_MAPPING_BYTES
from verl.utils.resources import available_cores

# A processor fills memory no faster than this, measured with page tables and with private memory in C.
_KB_PER_CORE_SECOND = 4 << 20
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.002, 0.025
# What the kernel needs for a mapping (with its reverse mappings), a watch of epoll per byte of its description, and a
# lock of a file; the buffer of a pipe, which a program cannot enlarge; datagrams that wait in one socket.
_MAPPING_BYTES, _EPOLL_FACTOR, _LOCK_BYTES, _PIPE_BYTES, _DATAGRAMS = 512, 3, 256, 65536, 12
_NAMELESS = ("/dev/zero", "/memfd:", "/SYSV")
_DELETED = " (deleted)"


@functools.cache
def socket_bytes() -> tuple[int, int]:
    """The send buffer of a socket, and the largest that a program can set where seccomp does not keep it from that.

    Called before a network namespace, which does not show them, is entered.
    """
    sizes = []
    for name in ("wmem_default", "wmem_max"):
        try:
            with open(f"/proc/sys/net/core/{name}", encoding="ascii") as file:
                sizes.append(int(file.read()))
        except OSError:
            sizes.append(212992)
    return sizes[0], 2 * sizes[1]


@dataclass
class Descriptors:
    """What open descriptors of some processes refer to, each object once."""

    sockets: set[str] = field(default_factory=set)
    pipes: set[str] = field(default_factory=set)
    epoll_bytes: int = 0
    locks: int = 0
    memory_bytes: int = 0
    deleted: dict[int, int] = field(default_factory=dict)
    """Bytes on disk by inode."""


class MemoryUsage:
    """`limited`: seccomp limits shared mappings and buffers. `namespaces`: network and IPC are the run's own."""

    def __init__(self, family: Family, limit_mb: int, limited: bool, namespaces: bool) -> None:
        self._family = family
        self._limit = limit_mb << 10
        self._least_object = SHARED_MAPPING_BYTES if limited else 0
        self._socket_bytes = socket_bytes()[0 if limited else 1]
        self._namespaces = namespaces
        self._nameless: dict[str, int] = {}
        self._tasks = 1
        self._headroom = self._limit
        self.deleted_mappings: set[int] = set()
        """Inodes of files on disk that are mapped but in no folder any more."""
        self.descriptors = Descriptors()

    @property
    def pause(self) -> float:
        """Seconds until the limit could be reached: the next look must be sooner."""
        rate = _KB_PER_CORE_SECOND * min(available_cores(), self._tasks + 1)
        return min(max(self._headroom / rate, _SHORTEST_SECONDS), _LONGEST_SECONDS)

    def over(self, processes: list[int], check_time: Callable[[], None]) -> bool:
        """Whether the processes together use more than the limit. `check_time`: called between slow steps."""
        statuses = [self._family.fields(pid, "status") for pid in processes]
        self._tasks = sum(status.get("Threads", 0) for status in statuses)
        own = sum(status.get("RssAnon", 0) for status in statuses)
        shared = sum(status.get("RssShmem", 0) for status in statuses)
        nameless, kernel = self._mappings(processes, check_time)
        kernel += self._buffers(processes, check_time) + (sum(status.get("VmPTE", 0) for status in statuses) << 10)
        used = own + max(shared, nameless >> 10) + (kernel >> 10)
        if used > self._limit and own + shared > 0:
            # Forks share most of it: only a precise look decides, which takes longer.
            own = self._precise(processes, "Pss_Anon", check_time)
            shared = self._precise(processes, "Pss_Shmem", check_time)
            used = own + max(shared, nameless >> 10) + (kernel >> 10) if own else used
        self._headroom = max(self._limit - used, 0)
        return used > self._limit

    def _precise(self, processes: list[int], name: str, check_time: Callable[[], None]) -> int:
        total = 0
        for pid in processes:
            total += self._family.fields(pid, "smaps_rollup").get(name, 0)
            check_time()
        return total

    def _mappings(self, processes: list[int], check_time: Callable[[], None]) -> tuple[int, int]:
        """Bytes of shared memory without a name, and of the kernel for the mappings themselves.

        An object counts with all that was ever seen mapped of it, and at least with what seccomp lets a program map:
        what a process wrote there stays when it ends, unmaps or discards it, and is then in no process's figures.
        """
        sizes: dict[str, int] = {}
        deleted: set[int] = set()
        count = 0
        for pid in processes:
            text = self._family.read(f"{pid}/maps")
            count += text.count("\n")
            for line in text.splitlines() if _DELETED in text else ():
                if line.endswith(_DELETED):
                    place, mode, offset, _, inode, path = line.split(maxsplit=5)
                    if not path.startswith(_NAMELESS):
                        deleted.add(int(inode))
                    elif mode.endswith("s"):
                        begin, end = (int(number, 16) for number in place.split("-"))
                        size = int(offset, 16) + end - begin
                        known = self._nameless.get(inode, self._least_object)
                        sizes[inode] = max(size, sizes.get(inode, 0), known)
            check_time()
        self._nameless = sizes
        self.deleted_mappings = deleted
        return sum(sizes.values()), count * _MAPPING_BYTES

    def _buffers(self, processes: list[int], check_time: Callable[[], None]) -> int:
        """Bytes that sockets, pipes, epoll and locks of files may hold."""
        found = Descriptors()
        for pid in processes:
            self._add_descriptors(found, pid)
            check_time()
        self.descriptors = found
        total = len(found.pipes) * _PIPE_BYTES + found.epoll_bytes + found.memory_bytes
        if found.sockets:
            sockets = self._unix_sockets() if self._namespaces else len(found.sockets)
            total += max(sockets, len(found.sockets)) * self._socket_bytes
        if self._namespaces and not self._least_object:  # neither refused nor shared with the host
            segments = [line.split() for line in self._family.read("sysvipc/shm").splitlines()[1:]]
            total += sum(int(fields[14]) for fields in segments)
        return total + found.locks * _LOCK_BYTES

    def _add_descriptors(self, found: Descriptors, pid: int) -> None:
        for number in self._family.names(f"{pid}/fd"):
            try:
                target = os.readlink(f"{pid}/fd/{number}", dir_fd=self._family.proc)
                if target.startswith("socket:"):
                    found.sockets.add(target)
                elif target.startswith("pipe:"):
                    found.pipes.add(target)
                elif target == "anon_inode:[eventpoll]":
                    found.epoll_bytes += len(self._family.read(f"{pid}/fdinfo/{number}")) * _EPOLL_FACTOR
                elif target.endswith(_DELETED):
                    file = os.stat(f"{pid}/fd/{number}", dir_fd=self._family.proc)
                    if target.startswith(_NAMELESS):
                        found.memory_bytes += file.st_blocks * 512
                    else:
                        found.deleted[file.st_ino] = file.st_blocks * 512
                if target.startswith("/") and not target.startswith("/dev/"):
                    found.locks += self._family.read(f"{pid}/fdinfo/{number}").count("lock:")
            except OSError:  # closed meanwhile
                continue

    def _unix_sockets(self) -> int:
        """All of the run's network namespace, those that wait to be accepted included; a socket for datagrams counts
        with those that may wait in it, whose senders are closed."""
        lines = [line.split() for line in self._family.read("self/net/unix").splitlines()[1:]]
        return sum(_DATAGRAMS if line[4] == "0002" else 1 for line in lines)
