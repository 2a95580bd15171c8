"""One logging setup for the whole framework: rich on a terminal, plain lines everywhere else."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from verl.utils.quiet_warnings import quiet_warnings

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_ALIASES = {"WARN": "WARNING", "FATAL": "CRITICAL"}


def setup_logging(level: str | int | None = None, stream: TextIO | None = None) -> logging.Logger:
    """Give the `verl` logger its one handler; calling again replaces it, so entry points and workers may all call.

    `level` defaults to the environment variable VERL_LOGGING_LEVEL, then INFO. Only the `verl` logger is touched: what
    other libraries and the user's own code log stays theirs. Warnings that nobody can act on are hidden.
    """
    logger = logging.getLogger("verl")
    logger.setLevel(_level_from_environment() if level is None else _parse_level(level))
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.addHandler(_make_handler(stream or sys.stderr))
    # hydra and ray install root handlers; without this every line would appear twice.
    logger.propagate = False
    quiet_warnings()
    return logger


@contextmanager
def shown_messages() -> Iterator[None]:
    """While inside, what `verl` logs is shown, as it is, on stderr: for a caller who has set up no logging at all.

    Whoever has (a handler on `verl` or above it) keeps theirs untouched.
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


def _level_from_environment() -> int:
    return _parse_level(os.environ.get("VERL_LOGGING_LEVEL", "INFO"))


def _parse_level(level: str | int) -> int:
    if isinstance(level, int):
        return level
    name = level.strip().upper()
    name = _ALIASES.get(name, name)
    if name.isdigit():
        return int(name)
    if name not in _LEVELS:
        raise ValueError(f"VERL_LOGGING_LEVEL: {level!r} is not a level. Use one of {', '.join(_LEVELS)} or a number.")
    return int(getattr(logging, name))


def _make_handler(stream: TextIO) -> logging.Handler:
    if stream.isatty():
        from rich.console import Console
        from rich.logging import RichHandler

        return RichHandler(console=Console(file=stream), show_path=False, rich_tracebacks=True, markup=False)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    return handler
