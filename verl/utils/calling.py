"""Calling users' functions: async or not alike, with the keywords they take, and given up when they take too long."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
# Threads cannot be stopped: so many may be stuck in users' functions at a time before no further one is started.
MOST_ABANDONED = 64


class AbandonedThreads:
    """How many threads of this process are still in a function whose caller has given up waiting."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0
        """Now."""
        self.total = 0
        """Since the process began."""

    def add(self, number: int) -> None:
        with self._lock:
            self.count += number
            self.total += max(number, 0)


abandoned_threads = AbandonedThreads()


async def invoke(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The function's result: a coroutine is awaited, anything else runs in a thread of its own.

    A cancelled caller does not wait for the thread. `sys.exit()` in a user's function is an error like others: it would
    end the program.
    """
    try:
        result = (
            function(*args, **kwargs)
            if inspect.iscoroutinefunction(inspect.unwrap(function))
            else await _in_thread(functools.partial(function, *args, **kwargs))
        )
        return await result if inspect.isawaitable(result) else result
    except SystemExit as error:
        raise RuntimeError(f"it called sys.exit({error.code})") from error


async def within(seconds: float, work: Awaitable[T]) -> T:
    """The result of `work`, or TimeoutError after `seconds`, also if it does not heed its cancellation."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        _give_up(task)
        raise
    if not done:
        _give_up(task)
        raise TimeoutError(f"no answer after {seconds:g} s")
    if task.cancelled():
        raise RuntimeError("it cancelled itself")
    return task.result()


def accepted(function: Callable[..., Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `keywords` that the function takes."""
    params = inspect.signature(function).parameters.values()
    if any(param.kind is param.VAR_KEYWORD for param in params):
        return dict(keywords)
    named = {param.name for param in params if param.kind in (param.POSITIONAL_OR_KEYWORD, param.KEYWORD_ONLY)}
    return {name: value for name, value in keywords.items() if name in named}


def _give_up(task: asyncio.Future[Any]) -> None:
    task.cancel()
    # What it ends with is nobody's any more; asyncio would report an error that was never asked for.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())


async def _in_thread(function: Callable[[], Any]) -> Any:
    """Run it in a daemon thread, which holds up neither its caller nor the end of the process."""
    if abandoned_threads.count >= MOST_ABANDONED:
        raise RuntimeError(f"{MOST_ABANDONED} earlier calls have not returned; no further thread is started")
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    lock, state = threading.Lock(), "running"
    context = contextvars.copy_context()

    def tell(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result(result) if error is None else future.set_exception(error)

    def run() -> None:
        nonlocal state
        result, error = None, None
        try:
            result = context.run(function)
        except BaseException as raised:  # noqa: BLE001 (told to the caller)
            # StopIteration cannot be an asyncio future's exception.
            error = RuntimeError(f"it raised {raised!r}") if isinstance(raised, StopIteration) else raised
        with lock:
            given_up, state = state == "given up", "done"
        if given_up:
            abandoned_threads.add(-1)
        else:
            _to_loop(loop, functools.partial(tell, result, error))

    threading.Thread(target=run, name="verl-call", daemon=True).start()
    try:
        return await future
    except asyncio.CancelledError:
        with lock:
            if state == "running":
                state = "given up"
                abandoned_threads.add(1)
        raise


def _to_loop(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        if not loop.is_closed():  # nobody waits any more
            raise


def also_spelled(**names: str) -> Callable[[F], F]:
    """Decorator: keywords that users' code writes otherwise, as `also_spelled(filepath="path")`."""

    def spelled(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for other, name in names.items():
                if other in kwargs and name not in kwargs:  # with both, the function itself refuses the other
                    kwargs[name] = kwargs.pop(other)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return spelled
