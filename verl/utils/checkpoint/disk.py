"""The disk under a folder: how much is free, and what to say when it is full."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
# As the system words them, where only the text of an error came through from another process.
_FULL_TEXTS = tuple(os.strerror(number) for number in _FULL)
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


class DiskFullError(OSError):
    """A step did not fit."""


def disk_full(root: Path, step: int, needed: int) -> DiskFullError:
    """For a save of `needed` bytes that did not fit; the half that was written should be gone by now."""
    disk, free = describe_disk(root), shutil.disk_usage(root).free
    return DiskFullError(
        errno.ENOSPC,
        f"no space left on {disk} for step {step} in {root}: it needs {show_bytes(needed)} or more, "
        f"{show_bytes(free)} are free. Free some, or set trainer.max_actor_ckpt_to_keep (SFT: max_ckpt_to_keep)",
    )


def is_full(error: BaseException | None) -> bool:
    """Whether the error, what it was raised from, or what a worker told of it is a full disk (or a spent quota)."""
    while error is not None:
        if (isinstance(error, OSError) and error.errno in _FULL) or any(text in str(error) for text in _FULL_TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False


def describe_disk(path: Path) -> str:
    """The file system under a path: where it is mounted, and from what."""
    path = path.absolute()
    place = next(folder for folder in (path, *path.parents) if folder.exists()).resolve()
    mount = next(str(point) for point in (place, *place.parents) if os.path.ismount(point))
    try:
        entries = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return mount
    device = next((entry[0] for entry in reversed(entries) if entry[1] == mount), None)
    return mount if device is None else f"{mount} ({device})"


def show_bytes(size: float) -> str:
    """1536 -> 1.5 KB."""
    for unit in _UNITS[:-1]:
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} {_UNITS[-1]}"
