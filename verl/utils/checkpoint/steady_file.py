"""A file whose bytes go to disk while it is written, and not into the memory that the system has for files."""

from __future__ import annotations

import io
import os
from typing import Any

from verl.utils.progress import pulse

# Written at once; and how much may wait for the disk, which the writer then waits for.
_PORTION, _WAITING = 16 * 2**20, 256 * 2**20


class SteadyFile(io.FileIO):
    """For files of many gigabytes: pages that wait for the disk would fill the host, and closing would wait for all.

    Where the system cannot be told, a plain file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "wb")
        self._end = self._at_disk = 0

    def write(self, data: Any, /) -> int:
        """A portion of it: buffered writers come back with the rest."""
        written = super().write(memoryview(data).cast("B")[:_PORTION])
        self._end += written
        pulse()
        if written == _PORTION and hasattr(os, "posix_fadvise"):
            # Of pages that are not on disk yet this starts the writing, and returns.
            os.posix_fadvise(self.fileno(), self._end - _PORTION, _PORTION, os.POSIX_FADV_DONTNEED)
            if self._end - self._at_disk >= _WAITING:
                os.fdatasync(self.fileno())
                os.posix_fadvise(self.fileno(), self._at_disk, self._end - self._at_disk, os.POSIX_FADV_DONTNEED)
                self._at_disk = self._end
        return written

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """What is overwritten afterwards counts again."""
        self._end = super().seek(offset, whence)
        self._at_disk = min(self._at_disk, self._end)
        return self._end
