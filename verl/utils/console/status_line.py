"""StatusLine: one line at the bottom of a terminal, below all other output of the process."""

from __future__ import annotations

import os
import sys
import threading
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_CLEAR = "\r\x1b[2K"
_DEFAULT_COLUMNS = 80
# Streams that replaced sys.stdout and sys.stderr. They are kept alive: a `print` in another thread, which uses a
# borrowed reference, would crash if they were freed when the line is closed.
_replaced: list[Any] = []


def is_terminal() -> bool:
    """Return whether both standard streams are terminals: in a file or a pipe there is no status line."""
    return sys.stdout.isatty() and sys.stderr.isatty()


@contextmanager
def status_line() -> Iterator[StatusLine]:
    """Context with a status line on the terminal of stderr; sys.stdout and sys.stderr are replaced, so that other
    output clears the line before it is written."""
    stdout, stderr = sys.stdout, sys.stderr
    line = StatusLine(stderr)
    sys.stdout, sys.stderr = line.above(stdout), line.above(stderr)
    _replaced.extend((sys.stdout, sys.stderr))
    try:
        yield line
    finally:
        line.close()
        sys.stdout, sys.stderr = stdout, stderr


class StatusLine:
    """`show(text)` draws or replaces the line. Thread-safe, also in signal handlers."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._lock = threading.RLock()  # a signal handler may write while this thread does
        self._text = ""
        self._at_line_start = True

    def show(self, text: str) -> None:
        """Replace the line; it is cut to the width of the terminal."""
        with self._lock:
            self._text = text
            if self._at_line_start:
                self._draw(_CLEAR + self._fitting())

    def close(self) -> None:
        """Remove the line."""
        with self._lock:
            if self._text and self._at_line_start:
                self._draw(_CLEAR)
            self._text = ""

    def above(self, stream: Any) -> _StreamAbove:
        """Return a stream whose text appears above the line."""
        return _StreamAbove(self, stream)

    def write_above(self, stream: Any, text: str) -> int:
        """Write other output: clear the line, write, draw the line again once the output is at the start of a line."""
        with self._lock:
            if self._text and self._at_line_start:
                self._draw(_CLEAR)
            count = stream.write(text)
            self._at_line_start = text.endswith("\n") if text else self._at_line_start
            if self._text and self._at_line_start:
                stream.flush()
                self._draw(self._fitting())
            return int(count)

    def _draw(self, text: str) -> None:
        if self._stream.isatty():  # else the terminal was closed, and output goes to a file
            self._stream.write(text)
            self._stream.flush()

    def _fitting(self) -> str:
        """The text, cut to one column less than the terminal has, since the last column may wrap."""
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError, AttributeError):
            columns = 0
        return cut_to_width(self._text, (columns or _DEFAULT_COLUMNS) - 1)


class _StreamAbove:
    """A standard stream that writes above a status line; everything else is the stream's own."""

    def __init__(self, line: StatusLine, stream: Any) -> None:
        self._line, self._stream = line, stream

    def write(self, text: str) -> int:
        return self._line.write_above(self._stream, text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def cut_to_width(text: str, columns: int) -> str:
    """Return the beginning of the text that fits into this many columns; `…` marks a cut."""
    if sum(map(_width, text)) <= columns:
        return text
    used, kept = 0, []
    for character in text:
        used += _width(character)
        if used > columns - 1:
            break
        kept.append(character)
    return "".join(kept) + "…" if columns > 0 else ""


def _width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
