"""Stop signals. Before the first step they end the run immediately; later the run finishes its step and saves first.
A second signal always ends it immediately."""

from __future__ import annotations

import logging
import os
import signal
import sys
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
RUN_ENDED = "the run has already ended; exiting without waiting for clean-up"


@dataclass
class Asked:
    """The signal that asked for the end, once there was one."""

    by: str | None = None


class StopSignal(KeyboardInterrupt):
    """A stop signal while there is no step to finish or save; `by` is its name.

    `before_first_step`: the program is known to train, and its first step has not begun.
    """

    def __init__(self, by: str, before_first_step: bool = False) -> None:
        super().__init__(by)
        self.by, self.before_first_step = by, before_first_step

    @property
    def exit_code(self) -> int:
        """The code that a shell reports for a process killed by the signal."""
        return 128 + signal.Signals[self.by]


@contextmanager
def stop_signals_raise() -> Iterator[None]:
    """SIGTERM, SIGHUP and SIGUSR1 raise StopSignal in the main thread instead of killing the process silently."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, frame: Any) -> None:
        raise StopSignal(signal.Signals(number).name)

    caught = [number for number in ENDING if signal.getsignal(number) == signal.SIG_DFL]
    for number in caught:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def before_first_step() -> Iterator[None]:
    """Around the start of a training run: mark a StopSignal from this block with `before_first_step`."""
    try:
        yield
    except StopSignal as error:
        error.before_first_step = True
        raise


def exit_on_signals(message: str) -> None:
    """From now on a signal prints one line and exits with code 0: only clean-up is left."""
    if threading.current_thread() is not threading.main_thread():
        return

    def on_signal(number: int, frame: Any) -> None:
        sys.stderr.write(f"{signal.Signals(number).name}: {message}\n")
        sys.stderr.flush()
        os._exit(0)

    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, on_signal)


@contextmanager
def stop_on_signals(
    ask: Callable[[], Any],
    at_once: Callable[[], Any] = lambda: None,
    first: str = FINISHES,
    asked: Asked | None = None,
    starting: Callable[[], bool] = lambda: False,
) -> Iterator[Asked]:
    """SIGTERM, SIGHUP, SIGUSR1 and Ctrl-C call `ask`; a second one calls `at_once` and ends the process.

    While `starting()` is true, the first one calls `at_once` and raises StopSignal.

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
        if starting():
            at_once()
            raise StopSignal(name, before_first_step=True)
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
