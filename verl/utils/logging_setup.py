"""Output of a process: one setup of logging, filters for useless warnings, and a file for output to a lost terminal."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from verl.utils.console import FULL, LINE, log_startup_phases

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
# (category, beginning of the message). Never warnings with a remedy or about users' code.
HIDDEN_WARNINGS: tuple[tuple[type[Warning], str], ...] = (
    # torch renames its collectives, and calls them by the old name itself.
    (FutureWarning, "`torch.distributed.all_gather_into_tensor` is deprecated"),
    (FutureWarning, "`torch.distributed.reduce_scatter_tensor` is deprecated"),
    # A CPU without bf16 instructions: torch takes its slower path by itself.
    (UserWarning, "mkldnn_matmul failed"),
)

# Environment variables that are set for console=line, unless the user has set them: progress bars and load
# reports would interrupt the lines.
_QUIET_LIBRARIES = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}


def setup_logging(
    level: str | int | None = None, stream: TextIO | None = None, console: str = FULL, with_time: bool = False
) -> logging.Logger:
    """Give the `verl` logger its one handler; calling again replaces it, so entry points and workers may all call.

    `level` defaults to the environment variable VERL_LOGGING_LEVEL, then INFO. Only the `verl` logger is changed: what
    other libraries and users' code log is unchanged. `HIDDEN_WARNINGS` are hidden.

    `console`: the value of `trainer.console`. With `line`, messages have no logger name, and no time unless `with_time`
    is set; start-up phases are logged, and the progress bars of transformers are off.
    """
    logger = logging.getLogger("verl")
    logger.setLevel(_level_from_environment() if level is None else _parse_level(level))
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    if console == LINE:
        handler = LineHandler(stream)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s" if with_time else "%(message)s"))
        logger.addHandler(handler)
        for variable, value in _QUIET_LIBRARIES.items():
            os.environ.setdefault(variable, value)
    else:
        logger.addHandler(_make_handler(stream or sys.stderr))
    log_startup_phases(console == LINE)
    # hydra and ray install root handlers; without this every line would appear twice.
    logger.propagate = False
    quiet_warnings()
    return logger


def quiet_warnings() -> None:
    """Hide `HIDDEN_WARNINGS` in this process; every program and every worker calls it once."""
    for kind, beginning in HIDDEN_WARNINGS:
        warnings.filterwarnings("ignore", message=re.escape(beginning), category=kind)


@contextmanager
def messages_on_stderr() -> Iterator[None]:
    """Write the messages of the `verl` logger to stderr inside the block, if logging is not set up.

    Existing handlers, of `verl` or the root logger, are not changed.
    """
    logger = logging.getLogger("verl")
    if logger.hasHandlers():
        yield
        return
    handler, level = logging.StreamHandler(), logger.level
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(_level_from_environment())
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class CurrentStderrHandler(logging.StreamHandler):
    """Writes to the current sys.stderr, which a status line replaces, unless it has a stream of its own."""

    def __init__(self, stream: TextIO | None = None) -> None:
        logging.Handler.__init__(self)
        self._own_stream = stream

    @property
    def stream(self) -> Any:
        return sys.stderr if self._own_stream is None else self._own_stream


class LineHandler(CurrentStderrHandler):
    """Handler of console=line: messages without time and logger name; warnings and errors with their level.

    A record with the attribute `step_note` is not written if notes are collected for the lines of steps
    (`collect_step_notes`).
    """

    def emit(self, record: logging.LogRecord) -> None:
        note = getattr(record, "step_note", None)
        if note is None or _step_notes is None:
            super().emit(record)
        else:
            _step_notes.append(note)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno < logging.WARNING else f"{record.levelname}: {text}"


_step_notes: list[str] | None = None


def collect_step_notes(enabled: bool) -> None:
    """Set whether `LineHandler` collects the notes of steps, which a tracker then takes, or writes them as lines."""
    global _step_notes
    _step_notes = [] if enabled else None


def take_step_notes() -> list[str]:
    """Return and forget the notes of the current step."""
    global _step_notes
    notes, _step_notes = _step_notes or [], None if _step_notes is None else []
    return notes


def _level_from_environment() -> int:
    return _parse_level(os.environ.get("VERL_LOGGING_LEVEL", "INFO"))


def _parse_level(level: str | int) -> int:
    if isinstance(level, int):
        return level
    name = level.strip().upper()
    number = int(name) if name.isdigit() else logging.getLevelName(name)
    if not isinstance(number, int):
        raise ValueError(f"VERL_LOGGING_LEVEL: {level!r} is not a level. Use one of {', '.join(_LEVELS)} or a number.")
    return number


def _make_handler(stream: TextIO) -> logging.Handler:
    if stream.isatty():
        from rich.console import Console
        from rich.logging import RichHandler

        return RichHandler(console=Console(file=stream), show_path=False, rich_tracebacks=True, markup=False)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    return handler


# ---------------------------------------------------------------- lost terminal

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
