"""Work that goes on in a thread of its own: told once it is done, with what went wrong."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar
from weakref import WeakSet

T = TypeVar("T")

# A process that ends gives its threads so long. They end early: executors take no more work by then.
_ENDING_S = 20.0
_threads: WeakSet[threading.Thread] = WeakSet()


def in_background(name: str, work: Callable[[], T]) -> Future[T]:
    """Start `work`. It does not keep the process from ending, but for what it has in hand."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again for whoever waits
            done.set_exception(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _threads.add(thread)
    thread.start()
    return done


@atexit.register
def _let_them_end() -> None:
    """A thread that comes back from torch's code when the interpreter is gone aborts the process."""
    deadline = time.monotonic() + _ENDING_S
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))


class OneAfterTheOther:
    """Works in the background of which one goes on at a time, each awaited by whoever began it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._now: Future[None] | None = None
        self._awaited = True

    def settle(self) -> None:
        """Wait for the one that goes on; raise what went wrong with it, if nobody awaits it."""
        if self._now is not None:
            wait([self._now])
            if not self._awaited:
                self.finish()

    def begin(self, work: Callable[[], None]) -> None:
        """Start one; it must be settled what came before."""
        self._awaited = False
        self._now = in_background(self._name, work)

    def finish(self) -> None:
        """Wait for the one begun last, and raise what went wrong with it."""
        if self._now is not None:
            self._awaited = True
            self._now.result()
