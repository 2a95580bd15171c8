"""SharedLoop: one event loop that coroutines of every thread share, for as long as the process lives.

Clients and locks belong to the loop that they were first used on: with a loop for each call, a client made once would
hold connections of loops that are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["SharedLoop"]

_T = TypeVar("_T")


class SharedLoop:
    """It runs in a thread of its own, started with the first coroutine. Between calls it goes on: it notices there
    that a server has closed a connection."""

    def __init__(self, name: str) -> None:
        """`name` is the thread's."""
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._process = 0
        self._starting = threading.Lock()

    def submit(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Begin it; cancelling the future cancels it."""
        with self._starting:
            if self._loop is None or self._process != os.getpid():  # a fork has the loop, and not its thread
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=_run, args=(loop,), name=self._name, daemon=True)
                thread.start()
                self._loop, self._thread, self._process = loop, thread, os.getpid()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Its result; the caller's thread waits, the loop runs others meanwhile."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError(f"called from a coroutine of {self._name!r}, which would wait for itself: await it")
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # the caller was interrupted; else it is done
            raise


def _run(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        # A coroutine that wants to end its process stops the loop; whoever waits for it is told when the loop goes on.
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()
