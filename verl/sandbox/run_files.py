"""Access to the files in a run's directory, without following symbolic links that the program may have created."""

from __future__ import annotations

import contextlib
import os
import stat


def read_inside(folder: str, name: str, max_bytes: int) -> bytes | None:
    """Read up to `max_bytes` of a file; None if it is missing, not a regular file, or behind a symlink."""
    try:
        parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # a program may remove its directory
        return None
    try:
        *folders, last = os.path.normpath(name).split("/")
        for part in folders:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
            os.close(parent)
            parent = inner
        file = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
        with open(file, "rb") as content:
            return content.read(max_bytes) if stat.S_ISREG(os.fstat(file).st_mode) else None
    except OSError:
        return None
    finally:
        os.close(parent)


def make_executable(folder: str, name: str) -> None:
    """Make a regular file of the folder executable, if it exists."""
    with contextlib.suppress(OSError):
        parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            file = os.open(os.path.basename(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
            try:
                status = os.fstat(file)
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:  # not a hard link to another file
                    os.fchmod(file, 0o700)
            finally:
                os.close(file)
        finally:
            os.close(parent)
