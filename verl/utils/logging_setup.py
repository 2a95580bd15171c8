"""Logging of a process: one setup (rich on a terminal, plain lines elsewhere), and filters for useless warnings."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
# (category, beginning of the message). Never warnings with a remedy or about users' code.
HIDDEN_WARNINGS: tuple[tuple[type[Warning], str], ...] = (
    # torch renames its collectives, and calls them by the old name itself.
    (FutureWarning, "`torch.distributed.all_gather_into_tensor` is deprecated"),
    (FutureWarning, "`torch.distributed.reduce_scatter_tensor` is deprecated"),
    # A CPU without bf16 instructions: torch takes its slower path by itself.
    (UserWarning, "mkldnn_matmul failed"),
)


def setup_logging(level: str | int | None = None, stream: TextIO | None = None) -> logging.Logger:
    """Give the `verl` logger its one handler; calling again replaces it, so entry points and workers may all call.

    `level` defaults to the environment variable VERL_LOGGING_LEVEL, then INFO. Only the `verl` logger is changed: what
    other libraries and users' code log is unchanged. `HIDDEN_WARNINGS` are hidden.
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
