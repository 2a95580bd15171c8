"""Signals that end a run: the first asks it to finish its step and save, the second ends it at once."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

_ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))
_FINISHES = "stopping: this step is finished and saved first"


@dataclass
class Asked:
    """The signal that asked for the end, once there was one."""

    by: str | None = None


@contextmanager
def stop_on_signals(
    ask: Callable[[], Any], at_once: Callable[[], Any] = lambda: None, first: str = _FINISHES
) -> Iterator[Asked]:
    """SIGTERM, SIGHUP and Ctrl-C call `ask`; a second one calls `at_once` and ends the process.

    Signals that are ignored (`nohup`, a job in the background) stay so. Threads other than the main one get none.
    """
    asked = Asked()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def on_first(number: int, frame: Any) -> None:
        asked.by = signal.Signals(number).name
        for known in before:
            signal.signal(known, on_second)
        logger.warning("%s: %s (again to stop at once)", asked.by, first)
        ask()

    def on_second(number: int, frame: Any) -> None:
        for known, handler in before.items():
            # Ctrl-C stays an exception for whoever called us. Others kill: Ray's own handler would wait for Ray first.
            signal.signal(known, handler if known == signal.SIGINT else signal.SIG_DFL)
        at_once()
        os.kill(os.getpid(), number)

    before = {
        number: signal.signal(number, on_first) for number in _ENDING if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
