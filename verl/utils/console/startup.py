"""Start-up phases of this process: each logs its duration, and a long one is shown while it runs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from verl.utils.console.lines import format_duration
from verl.utils.console.status_line import is_terminal, status_line

logger = logging.getLogger(__name__)

_current: tuple[str, float] | None = None
_enabled = False
# Shorter phases are not logged.
_SHORTEST_S = 0.1
_REDRAW_S = 0.5
# Together: no silence of more than ten seconds.
_POLL_S, _LOG_INTERVAL_S = 2.0, 8.0


def log_startup_phases(enabled: bool) -> None:
    """Set whether phases of this process log their duration; by default they do not."""
    global _enabled
    _enabled = enabled


@contextmanager
def startup_phase(name: str) -> Iterator[None]:
    """Context of a phase; at its end it logs `start-up: NAME 3.4 s`."""
    global _current
    outer, start = _current, time.monotonic()
    _current = name, start
    try:
        yield
        seconds = time.monotonic() - start
        if _enabled and seconds >= _SHORTEST_S:
            logger.info("start-up: %s %s", name, format_duration(seconds))
    finally:
        _current = outer


def current_startup_phase() -> tuple[str, float]:
    """Return (name, seconds so far) of the current phase; ("", 0.0) outside of phases. Thread-safe."""
    phase = _current
    return ("", 0.0) if phase is None else (phase[0], time.monotonic() - phase[1])


def startup_text(name: str, seconds: float, activity: str | None = None) -> str:
    """Return the text of a running phase; `activity`: what the ranks do in it."""
    return f"start-up: {name}{f' ({activity})' if activity else ''}, {seconds:.0f} s so far"


class StartupLog:
    """Called every two seconds with the running phase: logs a line for every 8 s of it."""

    def __init__(self) -> None:
        self._name, self._logged_at = "", 0.0

    def __call__(self, name: str, seconds: float, activity: str | None = None) -> None:
        """`name`: empty outside of phases."""
        if name != self._name or seconds < self._logged_at:
            self._name, self._logged_at = name, 0.0
        if name and seconds - self._logged_at >= _LOG_INTERVAL_S:
            self._logged_at = seconds
            logger.info("%s", startup_text(name, seconds, activity))


@contextmanager
def show_startup(enabled: bool = True) -> Iterator[None]:
    """Context in which a thread shows the running phase of this process: on a terminal as a status line, else as a log
    line every eight seconds."""
    if not enabled:
        yield
        return
    done, log = threading.Event(), StartupLog()
    with status_line() if is_terminal() else nullcontext() as line:

        def keep_showing() -> None:
            while not done.wait(_POLL_S if line is None else _REDRAW_S):
                name, seconds = current_startup_phase()
                if line is None:
                    log(name, seconds)
                elif name:
                    line.show(startup_text(name, seconds))

        thread = threading.Thread(target=keep_showing, name="startup", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(timeout=5)
