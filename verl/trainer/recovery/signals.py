"""Stop signals. Before the first step they end the run immediately; later the run finishes its step and saves first.
A second signal always ends it immediately. A supervisor forwards signals to its child."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

logger = logging.getLogger(__name__)

STOP_SIGNALS = tuple(
    signal.Signals[name] for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name)
)
# The same signal within this time counts once: `timeout` signals its command and then the whole process group,
# schedulers signal every process, and supervisor and driver forward signals.
_DUPLICATE_S = 0.5
PREEMPTION_SIGNALS = ("SIGTERM", "SIGUSR1")
"""A scheduler sends them some time before it kills the run; Ctrl-C and SIGHUP set no time limit."""
FINISH_STEP = "stopping: this step is finished and saved first"
RUN_ENDED = "the run has already ended; exiting without waiting for clean-up"


@dataclass
class StopRequest:
    """A requested stop."""

    signal: str | None = None
    """Name of the signal that requested it; None: no request so far."""


class StopSignal(KeyboardInterrupt):
    """Raised by a stop signal while there is no step to finish or save.

    `name`: name of the signal. `before_first_step`: a training run has not begun its first step.
    """

    def __init__(self, name: str, before_first_step: bool = False) -> None:
        super().__init__(name)
        self.name, self.before_first_step = name, before_first_step

    @property
    def exit_code(self) -> int:
        """The exit code that a shell reports for a process killed by this signal."""
        return 128 + signal.Signals[self.name]


@contextmanager
def stop_signals_raise() -> Iterator[None]:
    """In this context, stop signals with the default handler raise StopSignal instead of killing the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, frame: Any) -> None:
        raise StopSignal(signal.Signals(number).name)

    caught = [number for number in STOP_SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    for number in caught:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, signal.SIG_DFL)


def exit_on_signals(message: str) -> None:
    """Install handlers for the end of a run, when only clean-up is left: a signal prints one line and exits with 0."""
    if threading.current_thread() is not threading.main_thread():
        return

    def on_signal(number: int, frame: Any) -> None:
        sys.stderr.write(f"{signal.Signals(number).name}: {message}\n")
        sys.stderr.flush()
        os._exit(0)

    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, on_signal)


@contextmanager
def stop_on_signals(
    request_stop: Callable[[], Any],
    kill: Callable[[], Any] = lambda: None,
    message: str = FINISH_STEP,
    request: StopRequest | None = None,
    is_starting: Callable[[], bool] = lambda: False,
) -> Iterator[StopRequest]:
    """In this context, the first stop signal (SIGTERM, SIGHUP, SIGUSR1, Ctrl-C) logs `message` and calls
    `request_stop`; a second one calls `kill` and ends the process. While `is_starting()` is true, the first one calls
    `kill` and raises StopSignal.

    SIGUSR1 is a scheduler's warning before another signal: the signal after it counts as the first. Signals that are
    ignored (`nohup`, a job in the background) stay ignored. Outside of the main thread, no handler is installed.
    """
    request = request or StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    received_at = 0.0
    raised: StopSignal | None = None

    def on_signal(number: int, frame: Any) -> None:
        nonlocal received_at, raised
        name, now = signal.Signals(number).name, time.monotonic()
        previous, seconds = request.signal, now - received_at
        # No function call between reading and writing: no other signal handler can run in between.
        request.signal, received_at = name, now
        if _is_duplicate(previous, name, seconds):
            return
        if previous not in (None, "SIGUSR1"):
            return on_second(number)
        if is_starting():
            kill()
            raised = StopSignal(name, before_first_step=True)
            raise raised
        logger.warning("%s: %s (again to stop at once)", request.signal, message)
        request_stop()

    def on_second(number: int) -> None:
        for known, handler in before.items():
            # Ctrl-C raises KeyboardInterrupt. Other signals kill, because Ray's handler would wait for Ray first.
            signal.signal(known, handler if known == signal.SIGINT else signal.SIG_DFL)
        kill()
        os.kill(os.getpid(), number)

    before = {
        number: signal.signal(number, on_signal)
        for number in STOP_SIGNALS
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield request
    except KeyboardInterrupt as error:
        # If the signal arrives during a blocking call of Ray, Ray raises a plain KeyboardInterrupt instead.
        if raised is not None and error is not raised:
            raise raised from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class SignalForwarder:
    """Context that records stop signals and forwards them to the process `child`, if it is set.

    Signals that are ignored stay ignored.
    """

    def __init__(self) -> None:
        self.child: int | None = None
        self.received: str | None = None
        """Name of the last stop signal; None: no signal so far."""
        self.received_at = 0.0
        """Time (`time.monotonic`) of that signal."""
        self.received_twice = False
        """A second stop signal arrived: the child is killed."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SignalForwarder:
        handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        self._before = {number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN}
        for number in self._before:
            signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore_handlers()

    def restore_handlers(self) -> None:
        """Install the signal handlers from before this context."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, seconds: float) -> None:
        """Sleep for `seconds`, or until a signal arrives."""
        deadline = time.monotonic() + seconds
        while self.received is None and time.monotonic() < deadline:
            time.sleep(0.1)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        previous, seconds = self.received, now - self.received_at
        # No function call between reading and writing: no other signal handler can run in between.
        self.received, self.received_at = name, now
        if _is_duplicate(previous, name, seconds):
            return
        self.received_twice = previous not in (None, "SIGUSR1")
        if self.child is not None:
            with suppress(ProcessLookupError):
                os.kill(self.child, number)


def _is_duplicate(first: str | None, second: str, seconds: float) -> bool:
    """Return whether the signal `second`, `seconds` after `first`, is another delivery of the same signal."""
    return first == second and seconds < _DUPLICATE_S
