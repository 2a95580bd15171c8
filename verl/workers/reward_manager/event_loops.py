"""EventLoops: runs async reward functions, hundreds of concurrent calls on the event loop of one scorer process.

Another process is started when every loop has `CALLS_PER_LOOP` calls. A call is cancelled when its time is up. If a
loop dies, or one call blocks it, its unfinished calls are repeated, each in its own process, so that only the faulty
call fails.
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
from verl.utils.process_pool.processes import DoneCallback
from verl.utils.reward_score.calls import pack_message, receive_message, serve_calls

CALLS_PER_LOOP = 256
# After this many lost loops without a result in between, calls are executed in their own processes instead of a loop.
_MAX_LOST_LOOPS = 3
_CHECK_INTERVAL_S = 1.0
# Additional time in which a loop must report that a call has timed out: a share of the timeout, and a minimum.
_GRACE, _MIN_GRACE_S = 0.2, 2.0


@dataclass(eq=False, slots=True)
class ScoreCall:
    """One call of the reward function."""

    row: Any
    number: int
    on_done: DoneCallback
    started: float = 0.0
    """Time at which it was sent to a loop."""
    isolated: bool = False
    """Its loop was lost: it is repeated in its own process."""

    def finish(self, value: Any, error: Exception | None = None) -> None:
        self.on_done(self.number, value, error)


@dataclass(eq=False, slots=True)
class _LoopConnection:
    """The connection to the event loop of a scorer process."""

    writer: asyncio.StreamWriter
    pid: int
    calls: dict[int, ScoreCall] = field(default_factory=dict)
    """Its unfinished calls by number, the oldest first."""


class EventLoops:
    """Up to `max_loops` event loops in processes of `pool`.

    The initializer of `pool` loads the reward function (`calls.load_function`).
    """

    def __init__(
        self, pool: ProcessPool, max_loops: int, timeout: float, run_isolated: Callable[[ScoreCall], None]
    ) -> None:
        """`run_isolated` executes a call in its own process, or raises if none can be started."""
        self._pool, self._max_loops, self._timeout, self._run_isolated = pool, max_loops, timeout, run_isolated
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._numbers = itertools.count(1)
        self._reset()

    def enqueue(self, rows: Sequence[Any], on_done: DoneCallback) -> None:
        """Queue one call per row; `on_done` is as in `ProcessPool.enqueue`. Raises if the first loop cannot be
        started."""
        calls = [ScoreCall(row, number, on_done) for number, row in enumerate(rows)]
        with self._lock:
            if self._thread is None:
                self._start()
            # With the lock: `close` must not end the event loop before it has received the calls.
            self._loop.call_soon_threadsafe(self._add_calls, calls)

    def close(self) -> None:
        """End the processes; unfinished calls fail with PoolClosed. The object may be used again."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is None:
                return
            self._loop.call_soon_threadsafe(self._stop)
            thread.join()
            self._pool.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._reset()

    # ---------------------------------------------------------------- start and stop

    def _reset(self) -> None:
        self._waiting: deque[ScoreCall] = deque()
        self._connections: list[_LoopConnection] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._processes = 0
        """Number of loop processes, including those that have not connected yet."""
        self._lost_loops = 0
        """Number of loops lost since the last result."""

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
        self._pool.enqueue(serve_calls, [arguments], self._on_process_end)
        # After `enqueue`, which may raise. `_count_process_end` cannot run before: it waits for this event loop.
        self._processes += 1

    def _on_process_end(self, number: int, value: Any, error: Exception | None) -> None:
        """Called by the pool's thread when the process of a loop has ended."""
        with contextlib.suppress(RuntimeError):  # raised if the event loop is closed
            self._loop.call_soon_threadsafe(self._count_process_end)

    def _count_process_end(self) -> None:
        """Update the counters, and start another process if calls wait for one."""
        self._processes -= 1
        self._lost_loops += 1
        self._dispatch()

    def _run(self) -> None:
        self._loop.call_later(_CHECK_INTERVAL_S, self._kill_blocked_loops)
        self._loop.run_forever()
        self._loop.close()

    def _stop(self) -> None:
        """Fail all unfinished calls, close the connections, and begin to stop the event loop."""
        self._server.close()
        unfinished = [*self._waiting, *(call for connection in self._connections for call in connection.calls.values())]
        self._waiting.clear()
        for connection in self._connections:
            connection.calls.clear()
        for call in unfinished:
            call.finish(None, PoolClosed("the scorers were closed"))
        for writer in set(self._writers):
            writer.close()
        self._stopping = asyncio.ensure_future(self._stop_loop())

    async def _stop_loop(self) -> None:
        """Stop this event loop when all `_serve` tasks have ended."""
        await asyncio.gather(*(asyncio.all_tasks() - {self._stopping}), return_exceptions=True)
        self._loop.stop()

    # ---------------------------------------------------------------- on the event loop of this process

    def _add_calls(self, calls: list[ScoreCall]) -> None:
        self._waiting += calls
        self._dispatch()

    def _dispatch(self) -> None:
        """Assign waiting calls to loops until one has to wait. If no process can be started, all waiting calls fail."""
        try:
            while self._waiting and self._assign(self._waiting[0]):
                self._waiting.popleft()
        except Exception as error:  # noqa: BLE001 - becomes the error of every waiting call
            failed, self._waiting = self._waiting, deque()
            for call in failed:
                failure = PoolClosed(f"no process can be started for the reward function: {error}")
                failure.__cause__ = error
                call.finish(None, failure)

    def _assign(self, call: ScoreCall) -> bool:
        """Assign a call to the least loaded loop; return False if it must wait, possibly for a new process."""
        connection = min(self._connections, key=lambda connection: len(connection.calls), default=None)
        if call.isolated:
            self._run_isolated(call)
        elif connection is not None and len(connection.calls) < CALLS_PER_LOOP:
            self._send(connection, call)
        elif self._lost_loops >= _MAX_LOST_LOOPS:
            self._run_isolated(call)
        else:
            is_starting = self._processes > len(self._connections)
            if self._processes < self._max_loops and not is_starting:
                self._start_process()
            return False
        return True

    def _send(self, connection: _LoopConnection, call: ScoreCall) -> None:
        number = next(self._numbers)
        try:
            data = pack_message(number, call.row)
        except Exception:  # noqa: BLE001 - the row cannot be pickled here; the pool can send more types
            self._run_isolated(call)
            return
        call.started = time.monotonic()
        connection.calls[number] = call
        connection.writer.write(data)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Exchange calls and results with one scorer process, from its connection to its end."""
        connection = None
        self._writers.add(writer)
        try:
            _, pid = await receive_message(reader)
            connection = _LoopConnection(writer, pid)
            self._connections.append(connection)
            self._dispatch()
            while True:
                number, result = await receive_message(reader)
                self._lost_loops = 0
                connection.calls.pop(number).finish(result)
                self._dispatch()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the process has ended
        finally:
            self._writers.discard(writer)
            writer.close()
            if connection is not None:
                self._connections.remove(connection)
                self._isolate(list(connection.calls.values()))

    def _isolate(self, calls: list[ScoreCall]) -> None:
        """Repeat the calls of a lost loop, before all waiting calls and each in its own process: one of them may have
        caused the loss."""
        for call in calls:
            call.isolated = True
        self._waiting.extendleft(reversed(calls))
        self._dispatch()

    def _kill_blocked_loops(self) -> None:
        """Kill loops that did not report the timeout of a call in time."""
        limit = self._timeout + max(_MIN_GRACE_S, _GRACE * self._timeout)
        for connection in self._connections:
            oldest = next(iter(connection.calls.values()), None)
            if oldest is not None and time.monotonic() - oldest.started > limit:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(connection.pid, signal.SIGKILL)
        self._loop.call_later(_CHECK_INTERVAL_S, self._kill_blocked_loops)
