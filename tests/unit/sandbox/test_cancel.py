"""Cancelling submitted programs: a running one is killed, a queued one never starts, its slot is free at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError

import pytest

from verl.sandbox import Limits, Sandbox
from verl.utils import process_tree

ENDLESS = "import os, time\nif os.fork() == 0: os.setsid()\nopen('started', 'w')\ntime.sleep(600)"
# The zygote and one spare: keeper, init and program.
IDLE = 4


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    limits = Limits(wall_s=600.0, memory_mb=256, processes=32)
    with Sandbox(require="none", limits=limits, warm=1, concurrency=1) as sandbox:
        yield sandbox


def test_a_cancelled_program_is_killed_and_its_slot_is_free(sandbox: Sandbox) -> None:
    future = sandbox.submit(ENDLESS)
    wait_until(lambda: future.running() and len(process_tree.with_descendants(sandbox.pid)) >= IDLE + 4)
    assert future.cancel()
    assert future.cancelled()
    with pytest.raises(CancelledError):
        future.result()
    # One slot: the next program starts when the cancelled one has ended.
    assert sandbox.submit("print(6 * 7)").result(timeout=30).stdout == "42\n"
    wait_until(lambda: len(process_tree.with_descendants(sandbox.pid)) == IDLE)


def test_a_queued_program_never_starts(sandbox: Sandbox) -> None:
    running, queued = sandbox.submit(ENDLESS), sandbox.submit("print('never')")
    assert queued.cancel()
    assert running.cancel()
    assert sandbox.submit("print(1)").result(timeout=30).stdout == "1\n"


def test_a_finished_program_cannot_be_cancelled(sandbox: Sandbox) -> None:
    future = sandbox.submit("print(1)")
    assert future.result(timeout=30).stdout == "1\n"
    assert not future.cancel()
    assert not future.running()


def test_a_closed_sandbox_accepts_no_program(sandbox: Sandbox) -> None:
    sandbox.close()
    with pytest.raises(RuntimeError, match="closed"):
        sandbox.submit("print(1)")


def test_cancelling_an_asyncio_task_kills_the_program(sandbox: Sandbox) -> None:
    async def cancel_a_run() -> None:
        future = sandbox.submit(ENDLESS)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(future), 0.5)
        assert future.cancelled()

    asyncio.run(cancel_a_run())
    wait_until(lambda: len(process_tree.with_descendants(sandbox.pid)) == IDLE)


@pytest.mark.parametrize(
    ("language", "code"),
    [("cpp", "#include <regex>\n#include <map>\nint main() { for (;;); }"), ("shell", "while true; do :; done")],
)
def test_a_compiler_and_other_languages_are_cancelled_too(sandbox: Sandbox, language: str, code: str) -> None:
    future = sandbox.submit(code, language)
    time.sleep(0.2)
    future.cancel()
    assert sandbox.submit("print(1)").result(timeout=30).stdout == "1\n"


def test_closing_ends_running_programs_and_cancels_queued_ones() -> None:
    sandbox = Sandbox(require="none", warm=0, concurrency=1)
    running, queued = sandbox.submit(ENDLESS), sandbox.submit("print(1)")
    wait_until(running.running)
    sandbox.close()
    assert running.result(timeout=30).status == "error"
    assert queued.cancelled()


def test_a_wrong_path_is_raised_by_the_future(sandbox: Sandbox) -> None:
    with pytest.raises(ValueError, match=r"'\.\./a'"):
        sandbox.submit("", fetch=["../a"]).result(timeout=30)


def wait_until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)
