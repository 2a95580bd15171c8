"""Users' functions are called alike, sync or async, and what does not return holds nobody up."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from contextlib import suppress

import pytest

from verl.utils import calling
from verl.utils.calling import abandoned_threads, accepted, invoke, within

NAME = contextvars.ContextVar("name", default="")


async def test_sync_and_async_functions_give_their_result_and_their_error():
    async def soon(x: int) -> int:
        return x + 1

    def later(x: int) -> int:
        assert threading.current_thread() is not threading.main_thread()
        return x + 1

    assert [await invoke(soon, 1), await invoke(later, x=1), await invoke(lambda: soon(1))] == [2, 2, 2]
    with pytest.raises(ZeroDivisionError):
        await invoke(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match=r"it raised StopIteration"):
        await invoke(lambda: next(iter(())))


async def test_exit_in_a_users_function_ends_only_the_call():
    async def leave() -> None:
        raise SystemExit(3)

    for function in (leave, lambda: exit(3)):
        with pytest.raises(RuntimeError, match=r"sys.exit\(3\)"):
            await invoke(function)


async def test_a_thread_sees_the_callers_context():
    NAME.set("trajectory 7")
    assert await invoke(NAME.get) == "trajectory 7"


async def test_a_stuck_thread_is_left_behind_counted_and_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calling, "MOST_ABANDONED", abandoned_threads.count + 2)
    before, freed = abandoned_threads.count, threading.Event()
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"no answer after 0.05 s"):
            await within(0.05, invoke(freed.wait))
    await asyncio.sleep(0)  # the second cancellation arrives
    assert abandoned_threads.count == before + 2
    with pytest.raises(RuntimeError, match="have not returned"):
        await invoke(lambda: None)
    freed.set()
    while abandoned_threads.count > before:
        await asyncio.sleep(0.01)
    assert await invoke(lambda: "again") == "again"


async def test_a_coroutine_that_ignores_its_cancellation_is_left_behind():
    async def stubborn() -> None:
        while not freed.is_set():
            with suppress(asyncio.CancelledError):
                await freed.wait()

    freed = asyncio.Event()
    with pytest.raises(TimeoutError):
        await within(0.05, stubborn())
    freed.set()


async def test_work_that_cancels_itself_does_not_look_like_the_callers_cancellation():
    async def gone() -> None:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="cancelled itself"):
        await within(1, gone())


def test_a_function_gets_the_keywords_that_it_takes():
    assert accepted(lambda a, *, b: 0, {"a": 1, "b": 2, "c": 3}) == {"a": 1, "b": 2}
    assert accepted(lambda **kw: 0, {"c": 3}) == {"c": 3}
