"""The processes of a run, as its keeper sees them from outside: who they are, and what they use."""

from __future__ import annotations

import contextlib
import os
import stat


class Family:
    """All that descends from a run's init. `proc`: the host's /proc; None: nothing is known."""

    def __init__(self, proc: int | None) -> None:
        self._proc = proc
        self._nameless: dict[tuple[str, str], int] = {}

    def members(self, init: int) -> list[int]:
        """The program and all that descends from it, with their numbers on the host."""
        found = list(dict.fromkeys(self.children(init)))
        for member in found:  # one whose parent ends meanwhile may show up twice
            found += set(self.children(member)).difference(found)
        return found

    def children(self, pid: int) -> list[int]:
        """Of all its threads: each knows only those that it started itself."""
        return [
            int(child)
            for thread in self._names(f"{pid}/task")
            for child in self._read(f"{pid}/task/{thread}/children").split()
        ]

    def memory(self, members: list[int], file: str, fields: tuple[str, ...]) -> int:
        """Kilobytes of all of them."""
        total = 0
        for pid in members:
            for line in self._read(f"{pid}/{file}").splitlines():
                if line.startswith(fields):
                    total += int(line.split()[1])
        return total

    def nameless_memory(self, members: list[int]) -> int:
        """Kilobytes of memory without a name that they share: all that was ever seen mapped of what still is. What one
        of them wrote there stays when it ends, unmaps or discards it, and then belongs to nobody's own figures.
        """
        sizes: dict[tuple[str, str], int] = {}
        for pid in members:
            for line in self._read(f"{pid}/maps").splitlines():
                if line.endswith(" (deleted)"):
                    place, mode, offset, device, inode, _ = line.split(maxsplit=5)
                    begin, end = (int(number, 16) for number in place.split("-"))
                    if mode.endswith("s"):
                        key, size = (device, inode), int(offset, 16) + end - begin
                        sizes[key] = max(size, sizes.get(key, 0), self._nameless.get(key, 0))
        self._nameless = sizes
        return sum(sizes.values()) >> 10

    def nameless_bytes(self, members: list[int]) -> int:
        """Space on disk of files that they hold open and that are in no folder any more."""
        sizes: dict[tuple[int, int], int] = {}
        for pid in members:
            for number in self._names(f"{pid}/fd"):
                with contextlib.suppress(OSError):
                    found = os.stat(f"{pid}/fd/{number}", dir_fd=self._proc)
                    if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
                        sizes[found.st_dev, found.st_ino] = found.st_blocks * 512
        return sum(sizes.values())

    def threads_of_user(self) -> int:
        """Processes and threads of this user, whether of this run or not."""
        count = 0
        for name in self._names("."):
            with contextlib.suppress(OSError, IndexError):
                if name.isdigit() and os.stat(name, dir_fd=self._proc).st_uid == os.getuid():
                    count += int(self._read(f"{name}/status").partition("Threads:")[2].split()[0])
        return count

    def _names(self, folder: str) -> list[str]:
        if self._proc is None:
            return []
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
        except OSError:
            return []
        try:
            return os.listdir(descriptor)
        except OSError:  # ended meanwhile
            return []
        finally:
            os.close(descriptor)

    def _read(self, path: str) -> str:
        if self._proc is None:
            return ""
        try:
            descriptor = os.open(path, os.O_RDONLY, dir_fd=self._proc)
        except OSError:
            return ""
        with open(descriptor, encoding="utf-8", errors="replace") as file:
            try:
                return file.read()
            except OSError:
                return ""
