"""Files on local disk: atomic replacement, appended JSON lines, large writes that bypass the page cache, full disks."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from verl.utils.progress import pulse

# Bytes per system call, and bytes that may wait for the disk before the writer waits for them.
PORTION_BYTES, MAX_PENDING_BYTES = 16 * 2**20, 256 * 2**20
_FULL = (errno.ENOSPC, errno.EDQUOT)
# The system's messages: an error from another process may be text only.
_FULL_TEXTS = tuple(os.strerror(number) for number in _FULL)
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path` that replaces it when the block ends; an error deletes it.

    Readers see the old content or the new one, also after a crash.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with partial.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_durably(path: Path, content: bytes) -> None:
    """Replace a small file atomically and flush its folder to disk."""
    with atomic_write(path) as file:
        file.write(content)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush the directory entries of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class UncachedFile(io.FileIO):
    """A new file whose bytes are flushed while it is written and dropped from the page cache.

    For files of many gigabytes: dirty pages would fill the host's memory, and closing would wait for all of them. A
    plain file on systems without `posix_fadvise`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "wb")
        self._end = self._flushed = 0

    def write(self, data: Any, /) -> int:
        """Write at most one portion of `data`: buffered writers call again with the rest."""
        written = super().write(memoryview(data).cast("B")[:PORTION_BYTES])
        self._end += written
        pulse()
        if written == PORTION_BYTES and hasattr(os, "posix_fadvise"):
            # For dirty pages, this starts the write-back and returns.
            os.posix_fadvise(self.fileno(), self._end - PORTION_BYTES, PORTION_BYTES, os.POSIX_FADV_DONTNEED)
            if self._end - self._flushed >= MAX_PENDING_BYTES:
                os.fdatasync(self.fileno())
                os.posix_fadvise(self.fileno(), self._flushed, self._end - self._flushed, os.POSIX_FADV_DONTNEED)
                self._flushed = self._end
        return written

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position; bytes after it count as not flushed."""
        self._end = super().seek(offset, whence)
        self._flushed = min(self._flushed, self._end)
        return self._end


class DiskFullError(OSError):
    """A checkpoint did not fit on the disk."""


def disk_full_error(root: Path, step: int, needed: int) -> DiskFullError:
    """Return the error for a checkpoint of `needed` bytes that did not fit. Call it after deleting the partial one."""
    disk, free = describe_disk(root), shutil.disk_usage(root).free
    return DiskFullError(
        errno.ENOSPC,
        f"no space left on {disk} for step {step} in {root}: it needs {format_bytes(needed)} or more, "
        f"{format_bytes(free)} are free. Free some, or set trainer.max_actor_ckpt_to_keep (SFT: max_ckpt_to_keep)",
    )


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether an error or one of its causes is a full disk or an exceeded quota, also as text of a worker."""
    while error is not None:
        if (isinstance(error, OSError) and error.errno in _FULL) or any(text in str(error) for text in _FULL_TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False


def describe_disk(path: Path) -> str:
    """Return the mount point and the device of a path's file system."""
    path = path.absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.exists()).resolve()
    mount = next(str(point) for point in (existing, *existing.parents) if os.path.ismount(point))
    try:
        entries = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return mount
    device = next((entry[0] for entry in reversed(entries) if entry[1] == mount), None)
    return mount if device is None else f"{mount} ({device})"


def format_bytes(size: float) -> str:
    """Return a size as text: 1536 is 1.54 KB."""
    for unit in _UNITS[:-1]:
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} {_UNITS[-1]}"


# ---------------------------------------------------------------- JSON lines


class JsonLines:
    """Appends objects to a file that is created with the first one. Each call of `append` is one unbuffered write."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None

    def append(self, rows: Sequence[Mapping[str, Any]]) -> int:
        """Append one line per object; return the number of bytes."""
        if self._file is None:
            self._file = self._path.open("ab", buffering=0)
            self._terminate_last_line()
        content = "".join(to_json(row) + "\n" for row in rows).encode()
        self._file.write(content)
        return len(content)

    def close(self) -> None:
        """Close the file; the next `append` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def supersede(self, first_step: int) -> None:
        """Move records of this step and later ones, and lines that are no records, to the superseded file."""
        if not self._path.is_file():
            return
        lines = self._path.read_bytes().splitlines(keepends=True)
        kept: list[bytes] = []
        superseded: list[bytes] = []
        for line in lines:
            step = _step_of(line)
            (superseded if step is None or step >= first_step else kept).append(line)
        if superseded:
            old = self._path.with_name(f"{self._path.stem}.superseded{self._path.suffix}")
            with old.open("ab") as file:
                file.writelines(line.rstrip(b"\n") + b"\n" for line in superseded)
            self._rewrite(kept)

    def merge_into_last(self, record: Mapping[str, Any]) -> bool:
        """Add the data to the last record if that is of the same step; return whether it is."""
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.is_file() else []
        if not lines or _step_of(lines[-1]) != record["step"]:
            return False
        last = json.loads(lines[-1])
        last["data"] |= record["data"]
        self.close()
        self._rewrite([*lines[:-1], (to_json(last) + "\n").encode()])
        return True

    def _rewrite(self, lines: Sequence[bytes]) -> None:
        with atomic_write(self._path) as stream:
            stream.writelines(lines)

    def _terminate_last_line(self) -> None:
        """Terminate an incomplete last line of a killed run: otherwise the next record would continue it."""
        with self._path.open("rb") as file:
            if file.seek(0, 2) and file.seek(-1, 2) is not None and file.read(1) != b"\n":
                self._file.write(b"\n")


def to_json(value: Any, indent: int | None = None, default: Callable[[Any], Any] = str) -> str:
    """Return strict JSON: NaN and infinities, which JSON lacks, are the strings "nan", "inf" and "-inf".

    `default` converts values of other types.
    """
    return json.dumps(_to_json_value(value), ensure_ascii=False, allow_nan=False, default=default, indent=indent)


def _to_json_value(value: Any) -> Any:
    """The value with non-finite floats as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _to_json_value(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(entry) for entry in value]
    return value


def _step_of(line: bytes) -> int | None:
    """The step of a record; None for an incomplete line."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None
