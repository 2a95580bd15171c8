"""Survive a lost standard output (closed terminal, pipe without a reader): further output goes to a file."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any

_LOST_ERRORS = (errno.EIO, errno.EPIPE)
_fallback = os.devnull


def survive_lost_terminal() -> None:
    """Redirect further output to the file of `set_fallback_file` when sys.stdout or sys.stderr is lost.

    Call it before other code keeps references to these streams.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:  # a replacement by other code may have no file
            stream.flush()
            setattr(sys, name, _FallbackStream(stream))


def set_fallback_file(path: str) -> None:
    """Set the file for output to a lost stream; until this is called, such output is discarded."""
    global _fallback
    _fallback = path


class _FallbackFile(io.FileIO):
    """A file descriptor that is redirected to the fallback file when its reader is gone."""

    def write(self, data: Any) -> int:
        """Write all data: there is no buffer that would write the remainder later."""
        remaining = memoryview(data).cast("B")
        while remaining:
            written = self._write_or_redirect(remaining)
            if written is None:
                raise BlockingIOError(errno.EAGAIN, "the reader does not read, and the file is non-blocking")
            remaining = remaining[written:]
        return len(data)

    def _write_or_redirect(self, data: memoryview) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _LOST_ERRORS:
                raise
            self._redirect(os.devnull)
            with suppress(OSError):  # no such folder yet, or a full disk: the output is discarded
                self._redirect(_fallback)
            return super().write(data)

    def _redirect(self, path: str) -> None:
        other = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(other, self.fileno())
        os.close(other)


class _FallbackStream(io.TextIOWrapper):
    """A copy of a stream, on the same file descriptor.

    Without a `BufferedWriter`, which raises "reentrant call" if a signal handler writes during a write: a closing
    terminal also sends SIGHUP, and the run would end with that error instead of saving.
    """

    def __init__(self, other: io.TextIOWrapper) -> None:
        raw: Any = _FallbackFile(other.fileno(), "w", closefd=False)
        super().__init__(raw, other.encoding, other.errors, None, other.line_buffering, other.write_through)
