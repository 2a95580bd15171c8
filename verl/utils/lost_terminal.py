"""A standard output that is lost (its terminal closed, its pipe has no reader) costs no run: lines go to a file."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any

_LOST = (errno.EIO, errno.EPIPE)
_place = os.devnull


def outlive_terminal() -> None:
    """From here on, what is written to a lost sys.stdout or sys.stderr goes where `keep_lost_output` said.

    Call it before anything else holds these streams.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:  # Python's own on a file; what others put there may have none
            stream.flush()
            setattr(sys, name, _Lasting(stream))


def keep_lost_output(place: str) -> None:
    """The file for what is written after the loss; before this is called there is none."""
    global _place
    _place = place


class _Output(io.FileIO):
    """A file descriptor that becomes another file when nobody can read what is written to it."""

    def write(self, data: Any) -> int:
        """All of it: no buffer that would try again stands before this one."""
        left = memoryview(data).cast("B")
        while left:
            written = self._some(left)
            if written is None:
                raise BlockingIOError(errno.EAGAIN, "nobody reads what is written, and the file does not wait")
            left = left[written:]
        return len(data)

    def _some(self, data: memoryview) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _LOST:
                raise
            self._become(os.devnull)
            with suppress(OSError):  # no such folder yet, or a full disk: then nowhere
                self._become(_place)
            return super().write(data)

    def _become(self, place: str) -> None:
        other = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(other, self.fileno())
        os.close(other)


class _Lasting(io.TextIOWrapper):
    """As the stream that was there, on the same file.

    Without a `BufferedWriter`, which refuses a signal's handler that writes while it writes: a terminal that closes and
    the SIGHUP that says so come together, and the run would end with its "reentrant call" instead of saving.
    """

    def __init__(self, other: io.TextIOWrapper) -> None:
        raw: Any = _Output(other.fileno(), "w", closefd=False)
        super().__init__(raw, other.encoding, other.errors, None, other.line_buffering, other.write_through)
