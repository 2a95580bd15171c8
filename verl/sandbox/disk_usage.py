"""Disk space of a run in a bare folder: every file in it, and files that are in no folder any more."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Mapping, Set

from verl.sandbox.room import MOST_FILES
from verl.utils.resources import available_cores

_BYTES_PER_CORE_SECOND = 2 << 30
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.002, 0.025
_DEEPEST = 64
_CHECK_TIME_FILES = 256


class _Excess(Exception):
    """Too much, too many or too deep; or a folder that cannot be read."""


class DiskUsage:
    """Space that the files of `folder` use. The program may be changing them."""

    def __init__(self, folder: str, limit_mb: int) -> None:
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        self._file_limit = limit_mb << 20
        self._limit = (limit_mb + 1) << 20  # with the folders themselves
        self._sizes: dict[int, int] = {}
        self._headroom = self._limit

    @property
    def pause(self) -> float:
        """Seconds until the limit could be reached: the next look must be sooner."""
        rate = _BYTES_PER_CORE_SECOND * available_cores()
        return min(max(self._headroom / rate, _SHORTEST_SECONDS), _LONGEST_SECONDS)

    def over(self, open_files: Mapping[int, int], mapped: Set[int], check_time: Callable[[], None]) -> bool:
        """Whether more than the limit is used, by files in the folder and by files without a name.

        `open_files`: bytes of those without a name, by inode. `mapped`: inodes of those that are only mapped: they
        count as they were last seen, and with the size that one file may have if they never were.
        """
        sizes = dict(open_files)
        try:
            self._count = 0
            self._repair(self._folder)
            self._walk(self._folder, 0, sizes, check_time)
        except _Excess:
            return True
        for inode in mapped:
            if inode not in sizes:
                sizes[inode] = self._sizes.get(inode, self._file_limit)
        self._sizes = sizes
        used = sum(sizes.values())
        self._headroom = max(self._limit - used, 0)
        return used > self._limit

    def _walk(self, folder: int, depth: int, sizes: dict[int, int], check_time: Callable[[], None]) -> None:
        """By descriptors: paths have no longest length then."""
        inner: list[str] = []
        with os.scandir(folder) as entries:
            for entry in entries:
                self._count += 1
                if self._count > MOST_FILES:
                    raise _Excess
                if self._count % _CHECK_TIME_FILES == 0:
                    check_time()
                try:
                    file = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                except PermissionError as error:
                    raise _Excess from error
                sizes[file.st_ino] = file.st_blocks * 512
                if stat.S_ISDIR(file.st_mode):
                    inner.append(entry.name)
        if inner and depth == _DEEPEST:
            raise _Excess
        for name in inner:
            try:
                descriptor = self._open(name, folder)
            except FileNotFoundError:
                continue
            except NotADirectoryError:
                continue  # replaced meanwhile; the next look sees what is there
            except OSError as error:
                raise _Excess from error
            try:
                self._walk(descriptor, depth + 1, sizes, check_time)
            finally:
                os.close(descriptor)

    def _open(self, name: str, parent: int) -> int:
        """A folder, whatever its mode: its owner is the keeper's user."""
        place = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        try:
            self._repair(place)
            return os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=place)
        finally:
            os.close(place)

    def _repair(self, folder: int) -> None:
        mode = stat.S_IMODE(os.fstat(folder).st_mode)
        if mode & 0o700 != 0o700:
            with contextlib.suppress(OSError):  # not its owner: opening it decides
                os.chmod(f"/proc/self/fd/{folder}", mode | 0o700)
