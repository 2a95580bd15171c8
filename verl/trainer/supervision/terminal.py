"""The terminal of a child in a process group of its own: lent when it wants to read, as shells do, and taken back."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

JOB_CONTROL = tuple(getattr(signal, name) for name in ("SIGTSTP", "SIGTTIN", "SIGTTOU") if hasattr(signal, name))
_INPUT = 0
_SHOW_CURSOR = "\x1b[?25h"


def go_on(child: int) -> None:
    """The child's group was stopped by the terminal: Ctrl-Z, or it reads or writes there and may not.

    In the foreground it gets the terminal. Elsewhere we stop too, which the shell says, and go on when the shell does.
    """
    if not _in_foreground():
        os.kill(os.getpid(), signal.SIGSTOP)
    if _in_foreground():
        _give_to(child)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGCONT)


def take_back(child: int) -> None:
    """The child is gone: the terminal is ours again, if it had it, and shows its cursor, which bars hide."""
    with suppress(OSError):
        if os.tcgetpgrp(_INPUT) == child:
            _give_to(os.getpgrp())
    if sys.stderr.isatty():
        sys.stderr.write(_SHOW_CURSOR)
        sys.stderr.flush()


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(_INPUT) == os.getpgrp()
    except OSError:  # no terminal, or none of ours
        return False


def _give_to(group: int) -> None:
    with _may_write(), suppress(OSError):
        os.tcsetpgrp(_INPUT, group)


@contextmanager
def _may_write() -> Iterator[None]:
    """Who is not in the foreground would be stopped for changing the terminal."""
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTTOU, before)
