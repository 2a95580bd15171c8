"""EventLoops: async reward functions, hundreds of calls under way at once on the event loop of one scorer process.

A further process is started where every loop that there is has `PER_LOOP` calls. A call is cancelled when its time is
up. A loop that dies, or that one call keeps from going on, costs nobody else: whatever was under way on it is done
again, each call in a process of its own, where it is found out whose fault it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.utils.process_pool import PoolClosed, ProcessPool
from verl.utils.process_pool.processes import Done
from verl.utils.reward_score.calls import message, receive, serve_calls

PER_LOOP = 256
# Loops lost without an answer in between; then calls go to processes of their own right away.
_MOST_LOST = 3
_LOOK_S = 1.0
# What a loop may take beyond the time of a call, to say that it is over.
_GRACE, _LEAST_GRACE_S = 0.2, 2.0


@dataclass(eq=False, slots=True)
class Call:
    """A call for one row, and who is told what became of it."""

    row: Any
    number: int
    done: Done
    began: float = 0.0
    apart: bool = False  # its loop was lost

    def tell(self, value: Any, error: Exception | None = None) -> None:
        self.done(self.number, value, error)


@dataclass(eq=False, slots=True)
class _Link:
    """A loop that has connected, and what it works on, the oldest first."""

    writer: asyncio.StreamWriter
    pid: int
    calls: dict[int, Call] = field(default_factory=dict)


class EventLoops:
    """Up to `most` loops in processes of `pool`, whose initializer loads what they run (`calls.load`)."""

    def __init__(self, pool: ProcessPool, most: int, timeout: float, alone: Callable[[Call], None]) -> None:
        """`alone` makes a call in a process of its own, or raises what keeps one from starting."""
        self._pool, self._most, self._timeout, self._alone = pool, most, timeout, alone
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._numbers = itertools.count(1)
        self._reset()

    def enqueue(self, rows: Sequence[Any], done: Done) -> None:
        """Make these calls some time soon; `done` as of `ProcessPool.enqueue`. Raises what keeps the first loop from
        starting."""
        calls = [Call(row, number, done) for number, row in enumerate(rows)]
        with self._lock:
            if self._thread is None:
                self._start()
        self._loop.call_soon_threadsafe(self._take, calls)

    def close(self) -> None:
        """End the processes; calls that are not over are a PoolClosed. May be used again."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is None:
                return
            self._loop.call_soon_threadsafe(self._stop)
            thread.join()
            self._pool.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._reset()

    # ---------------------------------------------------------------- starting and stopping

    def _reset(self) -> None:
        self._waiting: deque[Call] = deque()
        self._links: list[_Link] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._running = 0  # processes, those included that have not connected yet
        self._lost = 0  # since the last answer

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="verl-rewards-")
        self._loop = asyncio.new_event_loop()
        path = os.path.join(self._folder, "calls")
        self._server = self._loop.run_until_complete(asyncio.start_unix_server(self._serve, path))
        try:
            self._start_process()
        except BaseException:
            self._server.close()
            self._loop.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._reset()
            raise
        self._thread = threading.Thread(target=self._run, name="reward-loops", daemon=True)
        self._thread.start()

    def _start_process(self) -> None:
        arguments = os.path.join(self._folder, "calls"), self._timeout
        self._pool.enqueue(serve_calls, [arguments], self._on_end)
        self._running += 1  # its end is counted on this loop, so not before this

    def _on_end(self, number: int, value: Any, error: Exception | None) -> None:
        """In the pool's thread: a loop's process has ended."""
        with contextlib.suppress(RuntimeError):  # this loop is closed: nobody starts another
            self._loop.call_soon_threadsafe(self._count_end)

    def _count_end(self) -> None:
        self._running -= 1
        self._lost += 1
        self._deal()

    def _run(self) -> None:
        self._loop.call_later(_LOOK_S, self._look)
        self._loop.run_forever()
        self._loop.close()

    def _stop(self) -> None:
        self._server.close()
        unfinished = [*self._waiting, *(call for link in self._links for call in link.calls.values())]
        self._waiting.clear()
        for link in self._links:
            link.calls.clear()
        for call in unfinished:
            call.tell(None, PoolClosed("the scorers were closed"))
        for writer in set(self._writers):
            writer.close()
        self._ending = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        """When all that serve a loop have seen that it is over."""
        await asyncio.gather(*(asyncio.all_tasks() - {self._ending}), return_exceptions=True)
        self._loop.stop()

    # ---------------------------------------------------------------- on the loop of this process

    def _take(self, calls: list[Call]) -> None:
        self._waiting += calls
        self._deal()

    def _deal(self) -> None:
        """Give out what waits; if no process can be had for it, everyone who waits is told why."""
        try:
            while self._waiting and self._give_out(self._waiting[0]):
                self._waiting.popleft()
        except Exception as error:  # noqa: BLE001 - becomes the error of every call that waits
            told, self._waiting = self._waiting, deque()
            for call in told:
                closed = PoolClosed(f"no process can be started for the reward function: {error}")
                closed.__cause__ = error
                call.tell(None, closed)

    def _give_out(self, call: Call) -> bool:
        """To the loop with the most room, whether there is one; start another one if none has any."""
        link = min(self._links, key=lambda link: len(link.calls), default=None)
        if call.apart:
            self._alone(call)
        elif link is not None and len(link.calls) < PER_LOOP:
            self._send(link, call)
        elif self._lost >= _MOST_LOST:
            self._alone(call)
        else:
            if self._running < self._most and self._running == len(self._links):
                self._start_process()
            return False
        return True

    def _send(self, link: _Link, call: Call) -> None:
        number = next(self._numbers)
        try:
            sent = message(number, call.row)
        except Exception:  # noqa: BLE001 - what pickle cannot send may yet travel by content
            self._alone(call)
            return
        call.began = time.monotonic()
        link.calls[number] = call
        link.writer.write(sent)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One loop, from when it connects until it ends."""
        link = None
        self._writers.add(writer)
        try:
            _, pid = await receive(reader)
            link = _Link(writer, pid)
            self._links.append(link)
            self._deal()
            while True:
                number, outcome = await receive(reader)
                self._lost = 0
                link.calls.pop(number).tell(outcome)
                self._deal()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # its process has ended
        finally:
            self._writers.discard(writer)
            writer.close()
            if link is not None:
                self._links.remove(link)
                self._make_apart(list(link.calls.values()))

    def _make_apart(self, calls: list[Call]) -> None:
        """Those of a lost loop, before any others: one of them may be why."""
        for call in calls:
            call.apart = True
        self._waiting.extendleft(reversed(calls))
        self._deal()

    def _look(self) -> None:
        """End loops that have not said what became of a call though its time has long been up."""
        patience = self._timeout + max(_LEAST_GRACE_S, _GRACE * self._timeout)
        for link in self._links:
            oldest = next(iter(link.calls.values()), None)
            if oldest is not None and time.monotonic() - oldest.began > patience:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(link.pid, signal.SIGKILL)
        self._loop.call_later(_LOOK_S, self._look)
