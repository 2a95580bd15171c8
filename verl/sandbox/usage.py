"""Memory and disk space of a run where the kernel does not count them, read from /proc and from its folder."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field

from verl.sandbox.filesystem import MAX_FILES
from verl.sandbox.seccomp import SHARED_MAPPING_BYTES
from verl.utils.resources import available_cores

# A check that takes longer stops the program until the check has ended: a program could otherwise slow the checks down
# and exceed its limits during one.
_MAX_CHECK_SECONDS = 0.01
# Seconds between two checks.
_MIN_PAUSE, _MAX_PAUSE = 0.002, 0.025
# One core fills memory no faster than this, measured with page tables and with private memory in C.
_KB_PER_CORE_SECOND = 4 << 20
_DISK_BYTES_PER_CORE_SECOND = 2 << 30
# Kernel memory of a mapping (with its reverse mappings), of an epoll watch per byte of its description, and of a file
# lock; the buffer of a pipe, which a program cannot enlarge; datagrams that may be queued in one socket.
_MAPPING_BYTES, _EPOLL_FACTOR, _LOCK_BYTES, _PIPE_BYTES, _QUEUED_DATAGRAMS = 512, 3, 256, 65536, 12
_ANONYMOUS = ("/dev/zero", "/memfd:", "/SYSV")
_DELETED = " (deleted)"
_MAX_DEPTH = 64
_CHECK_TIME_FILES = 256


class RunProcesses:
    """The processes below a run's init, and their entries in /proc. `proc`: the host's /proc; None: not available."""

    def __init__(self, proc: int | None) -> None:
        self.proc = proc
        self._was_slow = False

    def descendants(self, init: int) -> list[int]:
        """The process ids, on the host, of the program and everything it started."""
        pids = list(dict.fromkeys(self.children(init)))
        for pid in pids:  # a process whose parent ends meanwhile may appear twice
            pids += set(self.children(pid)).difference(pids)
        return pids

    def children(self, pid: int) -> list[int]:
        """The children of all threads: the kernel lists them by thread."""
        return [
            int(child)
            for thread in self.names(f"{pid}/task")
            for child in self.read(f"{pid}/task/{thread}/children").split()
        ]

    def live_thread(self, pid: int) -> tuple[str, dict[str, int]]:
        """The folder in /proc of a thread that runs, and the numbers of its `status`.

        The folder of a process whose first thread has ended shows neither its memory nor its descriptors.
        """
        status = self.fields(str(pid), "status")
        if "VmPTE" not in status:
            for thread in self.names(f"{pid}/task"):
                if thread != str(pid):
                    folder = f"{pid}/task/{thread}"
                    return folder, self.fields(folder, "status")
        return str(pid), status

    def fields(self, folder: str, file: str) -> dict[str, int]:
        """The numbers of `status` or `smaps_rollup` by name, sizes in KB; empty if the thread has ended."""
        numbers: dict[str, int] = {}
        for line in self.read(f"{folder}/{file}").splitlines():
            name, _, value = line.partition(":")
            number = value.split(None, 1)[:1]
            if number and number[0].isdigit():
                numbers[name] = int(number[0])
        return numbers

    def signal(self, pids: list[int], number: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    @contextlib.contextmanager
    def stopped_if_slow(self, init: int) -> Iterator[Callable[[], None]]:
        """Yield `check_time`, to be called between slow steps: it stops all processes until the end of the context if
        the context lasts too long, or if the previous one did."""
        start = time.monotonic()
        max_seconds = 0.0 if self._was_slow else _MAX_CHECK_SECONDS
        stopped: list[int] = []

        def check_time() -> None:
            if not stopped and time.monotonic() - start >= max_seconds:
                while running := [pid for pid in self.descendants(init) if pid not in stopped]:
                    self.signal(running, signal.SIGSTOP)
                    stopped.extend(running)

        try:
            check_time()
            yield check_time
        finally:
            self.signal(stopped, signal.SIGCONT)
            self._was_slow = time.monotonic() - start > _MAX_CHECK_SECONDS

    def threads_of_user(self) -> int:
        """The number of processes and threads of this user, in this run and elsewhere."""
        count = 0
        for name in self.names("."):
            with contextlib.suppress(OSError, IndexError):
                if name.isdigit() and os.stat(name, dir_fd=self.proc).st_uid == os.getuid():
                    count += int(self.read(f"{name}/status").partition("Threads:")[2].split()[0])
        return count

    def names(self, folder: str) -> list[str]:
        if self.proc is None:
            return []
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.proc)
        except OSError:
            return []
        try:
            return os.listdir(descriptor)
        except OSError:  # the process has ended
            return []
        finally:
            os.close(descriptor)

    def read(self, path: str) -> str:
        if self.proc is None:
            return ""
        try:
            descriptor = os.open(path, os.O_RDONLY, dir_fd=self.proc)
        except OSError:
            return ""
        with open(descriptor, encoding="utf-8", errors="replace") as file:
            try:
                return file.read()
            except OSError:
                return ""


# -- memory ------------------------------------------------------------------------------------------------------


@functools.cache
def socket_bytes() -> tuple[int, int]:
    """The default send buffer of a socket, and the largest that a program can set without a seccomp filter.

    The first call must be before this process enters a network namespace, which hides these settings.
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
    """The objects that the open descriptors of a run's processes refer to, each counted once."""

    sockets: set[str] = field(default_factory=set)
    pipes: set[str] = field(default_factory=set)
    epoll_bytes: int = 0
    locks: int = 0
    memory_bytes: int = 0
    deleted: dict[int, int] = field(default_factory=dict)
    """Bytes on disk of deleted files, by inode."""


class MemoryUsage:
    """Memory of a run without a cgroup: pages, page tables, and kernel buffers that the program fills.

    `limited`: whether seccomp limits shared mappings and buffers, and forbids threads with their own descriptors.
    `namespaces`: whether the run has its own network and IPC namespaces.
    """

    def __init__(self, processes: RunProcesses, limit_mb: int, limited: bool, namespaces: bool) -> None:
        self._processes = processes
        self._limit = limit_mb << 10
        self._limited = limited
        self._min_mapping_bytes = SHARED_MAPPING_BYTES if limited else 0
        self._socket_bytes = socket_bytes()[0 if limited else 1]
        self._namespaces = namespaces
        self._anonymous: dict[str, int] = {}
        self._threads = 1
        self._headroom = self._limit
        self.deleted_mappings: set[int] = set()
        """Inodes of deleted files on disk that are still mapped."""
        self.descriptors = Descriptors()

    @property
    def pause(self) -> float:
        """Seconds in which the limit cannot be reached: the next check must be sooner."""
        rate = _KB_PER_CORE_SECOND * min(available_cores(), self._threads + 1)
        return min(max(self._headroom / rate, _MIN_PAUSE), _MAX_PAUSE)

    def exceeds_limit(self, pids: list[int], check_time: Callable[[], None]) -> bool:
        """Whether the processes together use more than the limit. `check_time`: called between slow steps."""
        threads = [self._processes.live_thread(pid) for pid in pids]
        folders, statuses = [folder for folder, _ in threads], [status for _, status in threads]
        self._threads = sum(status.get("Threads", 0) for status in statuses)
        private = sum(status.get("RssAnon", 0) for status in statuses)
        shared = sum(status.get("RssShmem", 0) for status in statuses)
        anonymous, kernel = self._mappings(folders, check_time)
        kernel += self._buffers(folders, check_time) + (sum(status.get("VmPTE", 0) for status in statuses) << 10)
        used = private + max(shared, anonymous >> 10) + (kernel >> 10)
        if used > self._limit and private + shared > 0:
            # Forks share most of their pages: only the proportional size, which takes longer to read, decides.
            private = self._proportional(folders, "Pss_Anon", check_time)
            shared = self._proportional(folders, "Pss_Shmem", check_time)
            used = private + max(shared, anonymous >> 10) + (kernel >> 10) if private else used
        self._headroom = max(self._limit - used, 0)
        return used > self._limit

    def _proportional(self, folders: list[str], name: str, check_time: Callable[[], None]) -> int:
        total = 0
        for folder in folders:
            total += self._processes.fields(folder, "smaps_rollup").get(name, 0)
            check_time()
        return total

    def _mappings(self, folders: list[str], check_time: Callable[[], None]) -> tuple[int, int]:
        """Bytes of anonymous shared memory, and of the kernel for all mappings.

        A shared object counts with the largest size that was seen mapped, and at least with the largest mapping that
        seccomp allows: pages that a process has written stay in use after it ends, unmaps or discards them, and no
        process reports them then.
        """
        sizes: dict[str, int] = {}
        deleted: set[int] = set()
        count = 0
        for folder in folders:
            text = self._processes.read(f"{folder}/maps")
            count += text.count("\n")
            for line in text.splitlines() if _DELETED in text else ():
                if line.endswith(_DELETED):
                    addresses, mode, offset, _, inode, path = line.split(maxsplit=5)
                    if not path.startswith(_ANONYMOUS):
                        deleted.add(int(inode))
                    elif mode.endswith("s"):
                        begin, end = (int(number, 16) for number in addresses.split("-"))
                        size = int(offset, 16) + end - begin
                        previous = self._anonymous.get(inode, self._min_mapping_bytes)
                        sizes[inode] = max(size, sizes.get(inode, 0), previous)
            check_time()
        self._anonymous = sizes
        self.deleted_mappings = deleted
        return sum(sizes.values()), count * _MAPPING_BYTES

    def _buffers(self, folders: list[str], check_time: Callable[[], None]) -> int:
        """Bytes that sockets, pipes, epoll and file locks may hold."""
        descriptors = Descriptors()
        for folder in folders:
            if self._limited:
                self._add_descriptors(descriptors, folder, check_time)
            else:  # each thread may have its own table of descriptors
                pid = folder.partition("/")[0]
                for thread in self._processes.names(f"{pid}/task"):
                    self._add_descriptors(descriptors, f"{pid}/task/{thread}", check_time)
            check_time()
        self.descriptors = descriptors
        total = len(descriptors.pipes) * _PIPE_BYTES + descriptors.epoll_bytes + descriptors.memory_bytes
        if descriptors.sockets:
            sockets = self._unix_sockets() if self._namespaces else len(descriptors.sockets)
            total += max(sockets, len(descriptors.sockets)) * self._socket_bytes
        if self._namespaces and not self._limited:  # neither refused nor shared with the host
            segments = [line.split() for line in self._processes.read("sysvipc/shm").splitlines()[1:]]
            total += sum(int(fields[14]) for fields in segments)
        return total + descriptors.locks * _LOCK_BYTES

    def _add_descriptors(self, descriptors: Descriptors, folder: str, check_time: Callable[[], None]) -> None:
        for index, number in enumerate(self._processes.names(f"{folder}/fd")):
            if index % _CHECK_TIME_FILES == 0:  # the program fills buffers while its many descriptors are read
                check_time()
            try:
                target = os.readlink(f"{folder}/fd/{number}", dir_fd=self._processes.proc)
                if target.startswith("socket:"):
                    descriptors.sockets.add(target)
                elif target.startswith("pipe:"):
                    descriptors.pipes.add(target)
                elif target == "anon_inode:[eventpoll]":
                    descriptors.epoll_bytes += len(self._processes.read(f"{folder}/fdinfo/{number}")) * _EPOLL_FACTOR
                elif target.endswith(_DELETED):
                    file = os.stat(f"{folder}/fd/{number}", dir_fd=self._processes.proc)
                    if target.startswith(_ANONYMOUS):
                        descriptors.memory_bytes += file.st_blocks * 512
                    else:
                        descriptors.deleted[file.st_ino] = file.st_blocks * 512
                if target.startswith("/") and not target.startswith("/dev/"):
                    descriptors.locks += self._processes.read(f"{folder}/fdinfo/{number}").count("lock:")
            except OSError:  # closed meanwhile
                continue

    def _unix_sockets(self) -> int:
        """Return the number of Unix sockets in the run's network namespace, including connections not accepted yet.

        A datagram socket counts as `_QUEUED_DATAGRAMS` sockets: datagrams of closed senders may be queued in it.
        """
        lines = [line.split() for line in self._processes.read("self/net/unix").splitlines()[1:]]
        return sum(_QUEUED_DATAGRAMS if line[4] == "0002" else 1 for line in lines)


# -- disk space --------------------------------------------------------------------------------------------------


class _LimitExceeded(Exception):
    """Too many files, too deeply nested folders, or a folder that cannot be read."""


class DiskUsage:
    """Space of the files in `folder`, which the program may be changing, and of its deleted files that are open."""

    def __init__(self, folder: str, limit_mb: int) -> None:
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        self._file_limit = limit_mb << 20
        self._limit = (limit_mb + 1) << 20  # including the folders themselves
        self._sizes: dict[int, int] = {}
        self._headroom = self._limit

    @property
    def pause(self) -> float:
        """Seconds in which the limit cannot be reached: the next check must be sooner."""
        rate = _DISK_BYTES_PER_CORE_SECOND * available_cores()
        return min(max(self._headroom / rate, _MIN_PAUSE), _MAX_PAUSE)

    def exceeds_limit(self, deleted: Mapping[int, int], mapped: Set[int], check_time: Callable[[], None]) -> bool:
        """Whether the files in the folder and deleted files use more than the limit.

        `deleted`: bytes of open deleted files, by inode. `mapped`: inodes of deleted files that are only mapped: they
        count with their last known size, or with the maximum of one file.
        """
        sizes = dict(deleted)
        try:
            self._count = 0
            self._make_accessible(self._folder)
            self._add_folder(self._folder, 0, sizes, check_time)
        except _LimitExceeded:
            return True
        for inode in mapped:
            if inode not in sizes:
                sizes[inode] = self._sizes.get(inode, self._file_limit)
        self._sizes = sizes
        used = sum(sizes.values())
        self._headroom = max(self._limit - used, 0)
        return used > self._limit

    def _add_folder(self, folder: int, depth: int, sizes: dict[int, int], check_time: Callable[[], None]) -> None:
        """Add sizes by inode. Uses descriptors, because paths may be longer than the kernel accepts."""
        subfolders: list[str] = []
        with os.scandir(folder) as entries:
            for entry in entries:
                self._count += 1
                if self._count > MAX_FILES:
                    raise _LimitExceeded
                if self._count % _CHECK_TIME_FILES == 0:
                    check_time()
                try:
                    file = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                except PermissionError as error:
                    raise _LimitExceeded from error
                sizes[file.st_ino] = file.st_blocks * 512
                if stat.S_ISDIR(file.st_mode):
                    subfolders.append(entry.name)
        if subfolders and depth == _MAX_DEPTH:
            raise _LimitExceeded
        for name in subfolders:
            try:
                descriptor = self._open(name, folder)
            except (FileNotFoundError, NotADirectoryError):
                continue  # removed or replaced meanwhile; the next check sees the new entry
            except OSError as error:
                raise _LimitExceeded from error
            try:
                self._add_folder(descriptor, depth + 1, sizes, check_time)
            finally:
                os.close(descriptor)

    def _open(self, name: str, parent: int) -> int:
        """Open a folder of the program, also one without read permission: the supervisor's user owns it."""
        path = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        try:
            self._make_accessible(path)
            return os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=path)
        finally:
            os.close(path)

    def _make_accessible(self, folder: int) -> None:
        mode = stat.S_IMODE(os.fstat(folder).st_mode)
        if mode & 0o700 != 0o700:
            with contextlib.suppress(OSError):  # another user owns it; if it is not readable, opening it fails
                os.chmod(f"/proc/self/fd/{folder}", mode | 0o700)
