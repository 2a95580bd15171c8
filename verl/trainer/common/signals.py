"""Signals that end a run: the first asks it to finish its step and save, the second ends it at once."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

ENDING = tuple(signal.Signals[name] for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
# `timeout` signals its command, then the command's whole group; schedulers signal every process, and ours each other.
_SAME_S = 0.5
FINISHES = "stopping: this step is finished and saved first"


@dataclass
class Asked:
    """The signal that asked for the end, once there was one."""

    by: str | None = None


@contextmanager
def stop_on_signals(
    ask: Callable[[], Any],
    at_once: Callable[[], Any] = lambda: None,
    first: str = FINISHES,
    asked: Asked | None = None,
) -> Iterator[Asked]:
    """SIGTERM, SIGHUP, SIGUSR1 and Ctrl-C call `ask`; a second one calls `at_once` and ends the process.

    SIGUSR1 is a scheduler's warning that another will follow, which then counts as the first.
    Signals that are ignored (`nohup`, a job in the background) stay so. Threads other than the main one get none.
    """
    asked = asked or Asked()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    asked_at = 0.0

    def on_signal(number: int, frame: Any) -> None:
        nonlocal asked_at
        name, now = signal.Signals(number).name, time.monotonic()
        earlier, seconds = asked.by, now - asked_at
        asked.by, asked_at = name, now  # nothing is called since they were read: no signal comes between
        if is_the_same(earlier, name, seconds):
            return
        if earlier not in (None, "SIGUSR1"):
            return on_second(number)
        logger.warning("%s: %s (again to stop at once)", asked.by, first)
        ask()

    def on_second(number: int) -> None:
        for known, handler in before.items():
            # Ctrl-C stays an exception for whoever called us. Others kill: Ray's own handler would wait for Ray first.
            signal.signal(known, handler if known == signal.SIGINT else signal.SIG_DFL)
        at_once()
        os.kill(os.getpid(), number)

    before = {
        number: signal.signal(number, on_signal) for number in ENDING if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_the_same(first: str | None, second: str, seconds: float) -> bool:
    """Whether a signal is only one more delivery of the first one, that many seconds after it."""
    return first == second and seconds < _SAME_S
