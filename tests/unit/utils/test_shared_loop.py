"""One event loop for all threads of a process, and another for each fork of it."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from verl.utils.shared_loop import SharedLoop

LOOP = SharedLoop("test")


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

    with pytest.raises(RuntimeError, match="'test', which would wait for itself"):
        LOOP.run(waits_for_itself())


def test_a_thread_that_cannot_be_started_costs_that_call_only(monkeypatch):
    loop = SharedLoop("late")
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
