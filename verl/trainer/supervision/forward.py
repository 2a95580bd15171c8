"""Signals that end a run, on their way from the supervisor to its child: each once, and a second one ends all."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from verl.trainer.common.signals import ENDING, is_the_same


class Forwarded:
    """While inside, signals go to `child`, or are noted where there is none. Those that are ignored stay so."""

    def __init__(self) -> None:
        self.child: int | None = None
        self.asked: str | None = None
        """The signal that asked for the end, once there was one."""
        self.at_once = False
        """It came again."""
        self._asked_at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Forwarded:
        known = {number: signal.getsignal(number) for number in ENDING}
        self._before = {number: handler for number, handler in known.items() if handler != signal.SIG_IGN}
        for number in self._before:
            signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, seconds: float) -> None:
        """As long, or until a signal comes."""
        deadline = time.monotonic() + seconds
        while self.asked is None and time.monotonic() < deadline:
            time.sleep(0.1)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        earlier, seconds = self.asked, now - self._asked_at
        self.asked, self._asked_at = name, now  # nothing is called since they were read: no signal comes between
        if is_the_same(earlier, name, seconds):
            return
        self.at_once = earlier not in (None, "SIGUSR1")
        if self.child is not None:
            with suppress(ProcessLookupError):
                os.kill(self.child, number)
