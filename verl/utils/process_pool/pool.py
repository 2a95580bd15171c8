"""ProcessPool: calls in worker processes; a call that hangs or kills its process fails alone.

`submit(function, *arguments, timeout=…)` returns a future, `gather_results(…)` waits for many calls. One thread
dispatches calls to workers, several per message, and enforces the time limit of each. The limit covers the time in
which the call runs, not the time of imports and not the time in which the worker had no CPU. Calls that were sent
together with a slow one are moved to other workers.

A slow call that only waits (for a network, for a lock, forever) uses no CPU, so an additional worker takes its place:
up to 256 such calls cost one time limit together. A call that computes forever occupies its worker until its limit: k
of them cost k × timeout / processes.

A worker or the fork server may be killed or stopped from outside. This is not the fault of the calls: they are retried
in a new process, up to `_MAX_LOSSES` times.
"""

from __future__ import annotations

import contextlib
import logging
import math
import pickle
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from verl.utils import process_tree
from verl.utils.exceptions import RemoteTraceback
from verl.utils.process_pool.fork_server import (
    GROWN,
    IMPORTING,
    MEMORY,
    MODULES,
    RETURNED,
    CannotSend,
    InitializerError,
    PoolClosed,
    ProcessDied,
    TaskTimeout,
)
from verl.utils.process_pool.processes import (
    CHECK_SECONDS,
    EXTERNAL_SIGNALS,
    CallPacing,
    DoneCallback,
    ForkServer,
    Task,
    WorkerProcess,
    portable_pickle,
)
from verl.utils.progress import expect, tick

logger = logging.getLogger(__name__)

_MAX_BLOCKED_WORKERS = 256
# Processes that a call may lose to signals. A call that kills its own process looks the same at first.
_MAX_LOSSES = 3
_TICK_SECONDS = 0.5

LOW_PRIORITY = 5
"""`nice` value of processes that work for clients of a server, so that the server itself has priority."""


class ProcessPool:
    """Up to `processes` workers, forked by a fork server that is started with the first call.

    `initializer` runs once, in the fork server; every worker inherits what it loads. The initializer, and functions
    that cannot be imported, are pickled by value (cloudpickle). A worker may use `memory_limit` bytes more than at its
    start. A worker that holds `max_growth` bytes more after a call than at its start is replaced. With `prefork`, all
    workers are forked when the server has started instead of when calls need them.

    An argument that is a `pickle.PickleBuffer` of bytes is not copied in this process; the function receives bytes.
    """

    def __init__(
        self,
        processes: int,
        *,
        initializer: Callable[[], object] | None = None,
        memory_limit: int | None = None,
        max_growth: int | None = None,
        prefork: bool = False,
    ) -> None:
        self._processes = processes
        self._initializer = initializer
        self._memory_limit, self._max_growth, self._prefork = memory_limit, max_growth, prefork
        self._waiting: deque[Task] = deque()
        self.workers: dict[int, WorkerProcess] = {}
        self._pacing = CallPacing()
        self._servers_lost = 0  # since the last result
        self.retried_calls = 0
        """Calls that were retried because their process was killed or stopped from outside, in total."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = False

    def submit(self, function: Callable[..., Any], *arguments: Any, timeout: float = math.inf) -> Future[Any]:
        """Call a function in a worker, for at most `timeout` seconds; the future cannot be cancelled.

        The future raises the function's exception or one of those of this package. A call may run twice if another call
        that was sent with it hung.
        """
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()

        def done(_: int, value: Any, error: Exception | None) -> None:
            future.set_result(value) if error is None else future.set_exception(error)

        self.enqueue(function, [arguments], done, timeout)
        return future

    def enqueue(
        self,
        function: Callable[..., Any],
        calls: Iterable[tuple[Any, ...]],
        done: DoneCallback,
        timeout: float = math.inf,
    ) -> None:
        """Call a function once per tuple of arguments; `done(number, value, error)` is called for each result.

        `done` usually runs in the pool's thread.
        """
        tasks, code = [], _pickled(function)
        for number, arguments in enumerate(calls):
            try:
                tasks.append(Task(code, *_pickled_arguments(arguments), timeout, done, number))
            except CannotSend as error:
                done(number, None, CannotSend(f"received arguments that cannot be sent to another process: {error}"))
        if tasks:
            with self._lock:
                if self._thread is None:
                    self._start()
                self._waiting.extend(tasks)
            self._wake()

    def close(self) -> None:
        """Kill every process; pending calls raise PoolClosed. The pool may be used again."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is None:
                return
            self._closing = True
        self._wake()
        thread.join()

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- starting and stopping

    def _start(self) -> None:
        self._closing = False
        self._wakeup_receiver, self._wakeup_sender = socket.socketpair()
        self._wakeup_receiver.setblocking(False)
        self._wakeup_sender.setblocking(False)
        self._start_server()
        self._thread = threading.Thread(target=self._run, name="process-pool", daemon=True)
        self._thread.start()

    def _start_server(self) -> None:
        for last in (False,) * (_MAX_LOSSES - 1) + (True,):
            try:
                self._server = ForkServer(self._initializer, self._memory_limit, self._max_growth)
                break
            except EOFError as error:
                if last:
                    raise InitializerError(f"lost {_MAX_LOSSES} times during start-up: {error}") from error
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup_receiver, selectors.EVENT_READ)
        self._selector.register(self._server.control, selectors.EVENT_READ)

    def _wake(self) -> None:
        # A full socket means that a wake-up is pending already; a closed one, that the thread has ended.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wakeup_sender.send(b"\0")

    def _run(self) -> None:
        reason = "the process pool failed"
        try:
            while not self._closing:
                try:
                    self._run_once()
                except (OSError, EOFError) as error:
                    reason = f"the process pool lost its fork server ({error})"
                    self._replace_server(reason)
            reason = "the process pool was closed"
        except (OSError, EOFError, InitializerError) as error:
            logger.error("%s, and another one cannot be started: %s", reason, error)
        finally:
            self._stop(reason)

    def _run_once(self) -> None:
        self._dispatch()
        self._wait_for_results()
        for ready, _ in self._selector.select(self._seconds_to_next_event()):
            self._handle_event(ready)
        self._check_clocks()

    def _replace_server(self, reason: str) -> None:
        """Start a new fork server. The workers died with the old one; all their calls are requeued."""
        self._servers_lost += 1
        if self._servers_lost > _MAX_LOSSES:
            raise EOFError(f"the fork server was lost {self._servers_lost} times without a result in between")
        logger.warning("%s: starting another one and retrying its calls.", reason)
        self._close_processes()
        for worker in self.workers.values():
            if worker.tasks:
                self._retry(worker.tasks.popleft(), "ended with the fork server")
            self._requeue(worker, keep=0)
        self.workers.clear()
        self._start_server()

    def _close_processes(self) -> None:
        self._selector.close()
        self._server.close()
        for worker in self.workers.values():
            worker.link.close()

    def _stop(self, reason: str) -> None:
        with self._lock:
            if self._thread is threading.current_thread():  # not closed by a caller: the next call restarts the pool
                self._thread = None
            unfinished = [task for worker in self.workers.values() for task in worker.tasks] + list(self._waiting)
            self._waiting.clear()
        self._close_processes()
        self._wakeup_receiver.close()
        self._wakeup_sender.close()
        self.workers.clear()
        for task in unfinished:
            task.finish(None, PoolClosed(reason))

    # ---------------------------------------------------------------- the pool's thread

    def _dispatch(self) -> None:
        """Send waiting calls to idle workers; fork workers up to the limit."""
        while self._waiting:
            counted = [worker for worker in self.workers.values() if not worker.blocked]
            worker = next((worker for worker in counted if not worker.tasks), None)
            if worker is not None and process_tree.why_not_running(worker.pid) == "stopped":
                self._kill(worker)
                continue
            if worker is None:
                if len(counted) >= self._processes:
                    return
                worker = self._fork()
            worker.tasks.extend(
                self._waiting.popleft()
                for _ in range(self._pacing.calls_per_message(len(self._waiting), self._processes))
            )
            try:
                worker.send()
            except OSError:  # it ended before it read all; calls can only be the cause if they are its first
                self._on_worker_exit(worker, blame_call=not worker.completed)
        while self._prefork and len(self.workers) < self._processes:
            self._fork()

    def _fork(self) -> WorkerProcess:
        worker = self._server.fork()
        self.workers[worker.pid] = worker
        self._selector.register(worker.link, selectors.EVENT_READ, worker)
        return worker

    def _wait_for_results(self) -> None:
        """Sleep until a worker should be done: waking up for every result would cost more than most calls."""
        left = [len(worker.tasks) for worker in self.workers.values() if worker.tasks and not worker.blocked]
        if left and min(left) > 1:
            time.sleep(self._pacing.wait_seconds(min(left)))

    def _handle_event(self, ready: selectors.SelectorKey) -> None:
        if ready.fileobj is self._wakeup_receiver:
            with contextlib.suppress(BlockingIOError):
                while self._wakeup_receiver.recv(4096):
                    pass
        elif ready.fileobj is self._server.control:
            # `ForkServer` reads the replies: this can only be the end of the connection.
            raise EOFError("the fork server ended")
        elif ready.data.pid in self.workers:
            self._read(ready.data)

    def _read(self, worker: WorkerProcess) -> None:
        """Handle the results that have arrived."""
        before, took, imported = worker.completed, 0.0, worker.importing is not None
        try:
            for kind, seconds, content in worker.receive():
                if kind == IMPORTING:  # does not count for the running call: restart its clock
                    worker.start_clock()
                    worker.importing = bytes(content).decode()
                    imported = True
                elif kind == MODULES:
                    self._server.preload(content)
                elif kind == GROWN:
                    worker.retiring = True
                elif not worker.tasks:  # a result without a call: other code writes to the socket
                    self._kill(worker)
                    return
                else:
                    took += seconds
                    if not self._handle_result(worker, kind, content):
                        break
        except EOFError:
            self._on_worker_exit(worker)
            return
        results = worker.completed - before
        if results and not imported:
            self._pacing.update(took, results)
        if results and worker.pid in self.workers:
            worker.start_clock()
            # A worker that was blocked may have been replaced meanwhile.
            if not worker.tasks and sum(not other.blocked for other in self.workers.values()) > self._processes:
                self._kill(worker)

    def _handle_result(self, worker: WorkerProcess, kind: bytes, content: memoryview) -> bool:
        """Deliver one result. Returns False if the worker was killed."""
        task = worker.tasks.popleft()
        # Earlier calls may have left objects in memory: try once more in a new process.
        if kind == MEMORY and worker.completed and not task.retried_for_memory:
            task.retried_for_memory = True
            worker.tasks.appendleft(task)
        else:
            task.finish(*_result(kind, content))
        worker.completed += 1
        self._servers_lost = 0
        worker.importing = None
        if kind != MEMORY and not worker.retiring:
            return True
        self._kill(worker)
        return False

    def _check_clocks(self) -> None:
        now = time.monotonic()
        for worker in list(self.workers.values()):
            if not worker.tasks or now < self._next_check(worker):
                continue
            task = worker.tasks[0]
            self._read(worker)  # the result may have arrived: this thread may have had no CPU either
            if worker.pid not in self.workers or not worker.tasks or worker.tasks[0] is not task:
                continue
            recent = worker.checked_at == worker.started_at and now - worker.started_at < CHECK_SECONDS
            worker.check_state(now)
            if worker.stopped:
                self._retry(worker.tasks.popleft(), "was stopped (SIGSTOP)")
                self._kill(worker)
            elif now - worker.started_at < task.timeout_s:
                self._handle_slow_call(worker, recent)
            elif not worker.extend_deadline(now, task.timeout_s):
                why = f", after importing {worker.importing}" if worker.importing else ""
                worker.tasks.popleft()
                task.finish(None, TaskTimeout(f"took longer than {task.timeout_s:g} s and was stopped{why}"))
                self._kill(worker)

    def _handle_slow_call(self, worker: WorkerProcess, recent: bool) -> None:
        """Handle a slow call: requeue the calls that were sent with it, and allow another worker if it only waits.

        `recent`: this is the first check of the call. Calls behind one that computes stay until other workers are idle.
        """
        if sum(other.blocked for other in self.workers.values()) > _MAX_BLOCKED_WORKERS:
            worker.blocked = False
        # A call that computes usually finishes soon, or has had little CPU time so far.
        if worker.blocked or not (recent or self._waiting):
            worker.retiring = worker.retiring or len(worker.tasks) > 1
            self._requeue(worker, keep=1)

    def _seconds_to_next_event(self) -> float | None:
        """Seconds until a call must be checked or stopped; None: until a message arrives."""
        events = [self._next_check(worker) for worker in self.workers.values() if worker.tasks]
        return max(0.0, min(events) - time.monotonic()) if events else None

    def _next_check(self, worker: WorkerProcess) -> float:
        return self._pacing.next_check(worker.started_at, worker.checked_at, worker.tasks[0].timeout_s)

    def _on_worker_exit(self, worker: WorkerProcess, blame_call: bool = True) -> None:
        """Fail or retry the running call of a worker that has exited, and requeue its other calls.

        The call is retried if the worker was killed by a signal that usually comes from outside.
        """
        code = self._server.exit_code(worker)
        process_end = process_tree.describe_exit(code)
        self._remove(worker)
        self._server.discard(worker)
        if blame_call and worker.tasks:
            task = worker.tasks.popleft()
            if code in EXTERNAL_SIGNALS:
                self._retry(task, process_end)
            else:
                task.finish(None, ProcessDied(process_end))
        self._requeue(worker, keep=0)

    def _retry(self, task: Task, process_end: str) -> None:
        """Requeue a call whose process was killed or stopped from outside, up to `_MAX_LOSSES` times."""
        task.num_losses += 1
        if task.num_losses < _MAX_LOSSES:
            self.retried_calls += 1
            self._waiting.appendleft(task)
        else:
            before = f"after {task.num_losses - 1} other processes were lost"
            task.finish(None, ProcessDied(f"{process_end}, {before}", external=True))

    def _kill(self, worker: WorkerProcess) -> None:
        self._requeue(worker, keep=0)
        self._remove(worker)
        self._server.kill(worker)

    def _requeue(self, worker: WorkerProcess, keep: int) -> None:
        while len(worker.tasks) > keep:
            self._waiting.appendleft(worker.tasks.pop())

    def _remove(self, worker: WorkerProcess) -> None:
        self._selector.unregister(worker.link)
        del self.workers[worker.pid]


def gather_results(start: Callable[[DoneCallback], None], calls: int, units: Sequence[int] | None = None) -> list[Any]:
    """Wait for the `calls` calls that `start(done)` begins; return their values or exceptions, in order.

    Cheaper per call than futures. Every result counts as progress of the waiting thread: 1, or its entry in `units`.
    """
    results: dict[int, Any] = {}
    units = [1] * calls if units is None else units
    total, reported = sum(units), 0
    all_done = threading.Event()

    def done(index: int, value: Any, error: Exception | None) -> None:
        results[index] = value if error is None else error
        if len(results) == calls:
            all_done.set()

    expect(total)
    start(done)
    while reported < total or len(results) < calls:
        all_done.wait(_TICK_SECONDS)
        finished = sum(units[index] for index in list(results))
        tick(finished - reported)
        reported = finished
    for result in results.values():
        if isinstance(result, PoolClosed):
            raise result
    return [results[index] for index in range(calls)]


def _pickled(value: Any) -> bytes:
    if getattr(value, "__module__", None) == "__main__":
        return portable_pickle(value)
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        return portable_pickle(value)  # the worker cannot import it by name: pickle it by value


def _pickled_arguments(arguments: tuple[Any, ...]) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """The pickled arguments, and the buffers among them that are sent without a copy."""
    buffers: list[pickle.PickleBuffer] = []

    def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
        if isinstance(memoryview(buffer).obj, bytes | bytearray):
            buffers.append(buffer)
            return False
        return True  # arrays would arrive read-only

    try:
        return pickle.dumps(arguments, pickle.HIGHEST_PROTOCOL, buffer_callback=keep_in_band), buffers
    except (pickle.PicklingError, AttributeError, TypeError):
        return portable_pickle(arguments), []  # by value, as in `_pickled`


def _result(kind: bytes, content: memoryview) -> tuple[Any, Exception | None]:
    """(value, error) of a result frame."""
    try:
        value = pickle.loads(content)
    except Exception as error:  # noqa: BLE001 - a class that exists only over there; becomes the call's error
        return None, CannotSend(f"returned a value that cannot be unpickled: {error}")
    if kind == RETURNED:
        return value, None
    raised, trace = value
    raised.__cause__ = RemoteTraceback(trace)
    return None, raised
