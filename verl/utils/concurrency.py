"""Threads and event loops: background tasks, a shared event loop, and calls of users' functions with a time limit."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import functools
import inspect
import os
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future, wait
from typing import Any, TypeVar
from weakref import WeakSet

__all__ = [
    "MAX_ABANDONED_THREADS",
    "BackgroundTask",
    "JobThread",
    "SharedEventLoop",
    "abandoned_threads",
    "accepted_keywords",
    "call_user_function",
    "run_in_thread",
    "wait_with_timeout",
]

T = TypeVar("T")

# Time that running background threads get at the end of the process.
_EXIT_TIMEOUT_S = 20.0
_threads: WeakSet[threading.Thread] = WeakSet()

# Threads cannot be stopped: at most this many may be stuck in users' functions before no further one is started.
MAX_ABANDONED_THREADS = 64


def run_in_thread(name: str, work: Callable[[], T], join_at_exit: bool = True) -> Future[T]:
    """Run `work` in a daemon thread; the future has its result or exception.

    `join_at_exit`: the exit of this process waits for the thread, up to a limit.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by Future.result()
            done.set_exception(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    if join_at_exit:
        _threads.add(thread)
    thread.start()
    return done


@atexit.register
def _join_threads() -> None:
    """Wait for background threads: one that returns from torch after the end of the interpreter aborts the process."""
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))


class BackgroundTask:
    """Runs one task at a time in a background thread: `wait_idle()`, `start(work)`, `result()`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._current: Future[None] | None = None
        self._collected = True

    def wait_idle(self) -> None:
        """Wait for the current task; raise its error unless `result` was called for it."""
        if self._current is not None:
            wait([self._current])
            if not self._collected:
                self.result()

    def start(self, work: Callable[[], None]) -> None:
        """Start a task. The previous one must have ended: call `wait_idle` first."""
        self._collected = False
        self._current = run_in_thread(self._name, work)

    def result(self) -> None:
        """Wait for the last task and raise its error."""
        if self._current is not None:
            self._collected = True
            self._current.result()


class JobThread:
    """Runs jobs one after the other in a daemon thread, which starts with the first job."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Run `job()` after all jobs that were submitted before; RuntimeError after `close`. Thread-safe."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"the thread {self._name!r} is closed and accepts no further job")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._jobs.put((job, future))
        return future

    def close(self) -> None:
        """End the thread after the submitted jobs, without waiting for them; safe to call twice."""
        with self._lock:
            self._is_closed = True
            self._jobs.put(None)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001 - raised by Future.result()
                future.set_exception(error)
            del item, job, future  # while the thread waits, they would keep their data in memory


class SharedEventLoop:
    """An event loop in its own thread, shared by the coroutines of all threads until the process ends.

    HTTP clients and asyncio locks belong to the loop of their first use: with a new loop per call, a shared client
    would hold connections of closed loops. The loop also runs between calls, so it notices connections that the server
    closes.
    """

    def __init__(self, name: str) -> None:
        """`name`: of the thread, which is started with the first coroutine."""
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._process = 0
        self._starting = threading.Lock()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Schedule a coroutine; cancelling the future cancels it."""
        with self._starting:
            if self._loop is None or self._process != os.getpid():  # a forked process has the loop without its thread
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=_run_forever, args=(loop,), name=self._name, daemon=True)
                thread.start()
                self._loop, self._thread, self._process = loop, thread, os.getpid()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine; blocks the calling thread. An interrupted call cancels the coroutine."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError(f"called from a coroutine of {self._name!r}, which would wait for itself: await it")
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        # A coroutine that raises SystemExit stops the loop; its future receives the exception when the loop resumes.
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()


class _ThreadCount:
    """Number of threads that still run a function whose caller has stopped waiting. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0
        """Current number of these threads."""
        self.total = 0
        """Number of these threads since the start of the process."""

    def add(self, number: int) -> None:
        with self._lock:
            self.count += number
            self.total += max(number, 0)


abandoned_threads = _ThreadCount()


async def call_user_function(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of a function: a coroutine function is awaited, any other runs in its own thread.

    A cancelled caller does not wait for the thread. `sys.exit()` or KeyboardInterrupt in the function becomes a
    RuntimeError: it would end the event loop.
    """
    try:
        result = (
            function(*args, **kwargs)
            if inspect.iscoroutinefunction(inspect.unwrap(function))
            else await _call_in_thread(functools.partial(function, *args, **kwargs))
        )
        return await result if inspect.isawaitable(result) else result
    except SystemExit as error:
        raise RuntimeError(f"the function called sys.exit({error.code})") from error
    except KeyboardInterrupt as error:
        raise RuntimeError("the function raised KeyboardInterrupt") from error


async def wait_with_timeout(seconds: float, work: Awaitable[T]) -> T:
    """Return the result of `work`; TimeoutError after `seconds`, even if `work` ignores its cancellation."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        _abandon(task)
        raise
    if not done:
        _abandon(task)
        raise TimeoutError(f"no answer after {seconds:g} s")
    if task.cancelled():
        raise RuntimeError("the coroutine cancelled itself")
    return task.result()


def accepted_keywords(function: Callable[..., Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `keywords` that the function accepts."""
    params = inspect.signature(function).parameters.values()
    if any(param.kind is param.VAR_KEYWORD for param in params):
        return dict(keywords)
    named = {param.name for param in params if param.kind in (param.POSITIONAL_OR_KEYWORD, param.KEYWORD_ONLY)}
    return {name: value for name, value in keywords.items() if name in named}


def _abandon(task: asyncio.Future[Any]) -> None:
    task.cancel()
    # Retrieve the exception: asyncio logs exceptions that are never retrieved.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())


async def _call_in_thread(function: Callable[[], Any]) -> Any:
    """Run a function in a daemon thread, which delays neither a cancelled caller nor the end of the process."""
    if abandoned_threads.count >= MAX_ABANDONED_THREADS:
        raise RuntimeError(f"{MAX_ABANDONED_THREADS} earlier calls have not returned; no further thread is started")
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    lock, state = threading.Lock(), "running"
    context = contextvars.copy_context()

    def set_outcome(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result(result) if error is None else future.set_exception(error)

    def run() -> None:
        nonlocal state
        result, error = None, None
        try:
            result = context.run(function)
        except BaseException as raised:  # noqa: BLE001 - raised in the caller
            # StopIteration cannot be an asyncio future's exception.
            error = RuntimeError(f"the function raised {raised!r}") if isinstance(raised, StopIteration) else raised
        with lock:
            abandoned, state = state == "abandoned", "done"
        if abandoned:
            abandoned_threads.add(-1)
        else:
            _call_soon(loop, functools.partial(set_outcome, result, error))

    threading.Thread(target=run, name="verl-call", daemon=True).start()
    try:
        return await future
    except asyncio.CancelledError:
        with lock:
            if state == "running":
                state = "abandoned"
                abandoned_threads.add(1)
        raise


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        if not loop.is_closed():  # a closed loop has no caller that waits
            raise
