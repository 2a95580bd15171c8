"""Users' functions are called alike, sync or async, and what does not return holds nobody up."""

from __future__ import annotations

import asyncio
import contextvars
import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from verl.utils import concurrency
from verl.utils.concurrency import (
    JobThread,
    SharedEventLoop,
    abandoned_threads,
    accepted_keywords,
    call_user_function,
    wait_with_timeout,
)

NAME = contextvars.ContextVar("name", default="")


async def test_sync_and_async_functions_give_their_result_and_their_error():
    async def soon(x: int) -> int:
        return x + 1

    def later(x: int) -> int:
        assert threading.current_thread() is not threading.main_thread()
        return x + 1

    assert [
        await call_user_function(soon, 1),
        await call_user_function(later, x=1),
        await call_user_function(lambda: soon(1)),
    ] == [2, 2, 2]
    with pytest.raises(ZeroDivisionError):
        await call_user_function(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await call_user_function(lambda: next(iter(())))


async def test_exit_in_a_users_function_ends_only_the_call():
    async def leave() -> None:
        raise SystemExit(3)

    for function in (leave, lambda: exit(3)):
        with pytest.raises(RuntimeError, match=r"sys.exit\(3\)"):
            await call_user_function(function)


async def test_a_thread_sees_the_callers_context():
    NAME.set("trajectory 7")
    assert await call_user_function(NAME.get) == "trajectory 7"


async def test_a_stuck_thread_is_left_behind_counted_and_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(concurrency, "MAX_ABANDONED_THREADS", abandoned_threads.count + 2)
    before, freed = abandoned_threads.count, threading.Event()
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"\b0\.05 s"):
            await wait_with_timeout(0.05, call_user_function(freed.wait))
    await asyncio.sleep(0)  # the second cancellation arrives
    assert abandoned_threads.count == before + 2
    with pytest.raises(RuntimeError, match="2 earlier calls"):
        await call_user_function(lambda: None)
    freed.set()
    while abandoned_threads.count > before:
        await asyncio.sleep(0.01)
    assert await call_user_function(lambda: "again") == "again"


async def test_a_coroutine_that_ignores_its_cancellation_is_left_behind():
    async def stubborn() -> None:
        while not freed.is_set():
            with suppress(asyncio.CancelledError):
                await freed.wait()

    freed = asyncio.Event()
    with pytest.raises(TimeoutError):
        await wait_with_timeout(0.05, stubborn())
    freed.set()


async def test_work_that_cancels_itself_does_not_look_like_the_callers_cancellation():
    async def gone() -> None:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="cancelled"):
        await wait_with_timeout(1, gone())


def test_a_function_gets_the_keywords_that_it_takes():
    assert accepted_keywords(lambda a, *, b: 0, {"a": 1, "b": 2, "c": 3}) == {"a": 1, "b": 2}
    assert accepted_keywords(lambda **kw: 0, {"c": 3}) == {"c": 3}


def test_a_closed_job_thread_finishes_its_jobs_and_rejects_others():
    thread, release = JobThread("test"), threading.Event()
    jobs = [thread.submit(release.wait), thread.submit(lambda: "last")]
    thread.close()
    with pytest.raises(RuntimeError, match="'test'"):
        thread.submit(lambda: "late")
    release.set()
    assert [job.result(120) for job in jobs] == [True, "last"]


LOOP = SharedEventLoop("test")


async def loop_of_caller() -> int:
    return id(asyncio.get_running_loop())


def test_all_threads_share_it():
    with ThreadPoolExecutor(4) as threads:
        assert len({*threads.map(lambda _: LOOP.run(loop_of_caller()), range(8))}) == 1


async def ends_its_process() -> None:
    raise SystemExit(3)


def test_a_coroutine_that_wants_to_end_the_process_costs_its_caller_only():
    with pytest.raises(SystemExit):
        LOOP.run(ends_its_process())
    assert LOOP.run(asyncio.sleep(0, "goes on")) == "goes on"


def test_who_would_wait_for_himself_is_told():
    async def waits_for_itself() -> None:
        LOOP.run(loop_of_caller())

    with pytest.raises(RuntimeError, match=r"'test'.*await"):
        LOOP.run(waits_for_itself())


def test_a_thread_that_cannot_be_started_costs_that_call_only(monkeypatch):
    loop = SharedEventLoop("late")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: 1 / 0)
        coroutine = loop_of_caller()
        with pytest.raises(ZeroDivisionError):
            loop.submit(coroutine)
        coroutine.close()
    assert loop.submit(asyncio.sleep(0, "later")).result(120) == "later"


def test_a_fork_has_its_own():
    """It has no thread that would run the one it was forked with."""
    LOOP.run(loop_of_caller())
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=lambda: answers.put(LOOP.run(asyncio.sleep(0, "ran"))), daemon=True)
    child.start()
    child.join(120)
    try:
        assert child.exitcode == 0
        assert answers.get() == "ran"
    finally:
        child.kill()
