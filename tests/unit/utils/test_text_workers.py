"""Text workers: limits on time and memory, and heavy work that delays no light work."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.support.tiny import tiny_tokenizer
from verl.utils import tokenizer
from verl.utils.tokenizer import (
    TextWorkers,
    TextWorkersBusy,
    TextWorkLimit,
    longest_token,
    max_characters,
    text_length,
    tokenizer_loader,
)


def count(tokenizer, text):
    return len(tokenizer(text)["input_ids"])


def spin(tokenizer):
    while True:
        pass


def grow(tokenizer):
    return len("x" * 2**32)


def exit_with(tokenizer, code):
    os._exit(code)


def end_by(tokenizer, number):
    os.kill(os.getpid(), number)


def test_a_text_of_more_characters_than_the_bound_has_more_tokens():
    tokenizer = tiny_tokenizer()
    assert longest_token(tokenizer) == len("<|assistant|>")
    longest = "<|assistant|>" * 10
    assert len(longest) == max_characters(tokenizer, 10)
    assert count(tokenizer, longest) == 10
    assert count(tokenizer, longest + "x") > 10


def test_the_length_of_nested_values_counts_keys_strings_and_values():
    assert text_length("abc") == 4
    assert text_length({"ab": ["cde", 1, None], "f": {}}) == 1 + 2 + 1 + (1 + (3 + 1) + 1 + 1) + 1
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    assert text_length(nested) == 100_001


@pytest.mark.processes
def test_work_is_stopped_at_its_limits_and_heavy_work_delays_no_light_work(monkeypatch):
    monkeypatch.setattr(tokenizer, "MAX_WAITING", 3)

    async def scenario():
        workers = TextWorkers(tokenizer_loader(tiny_tokenizer()), seconds=2.0, memory=2**30)
        try:
            assert await workers.call(count, "hello") == 5
            with pytest.raises(TextWorkLimit, match=r"\b1 GB\b"):
                await workers.call(grow)
            with pytest.raises(ZeroDivisionError):
                await workers.call(divide)
            with pytest.raises(TextWorkLimit, match=r": its process ended with exit code 3\. Shorten"):
                await workers.call(exit_with, 3)
            with pytest.raises(TextWorkLimit, match=r": its process was killed by SIGSEGV\. Shorten"):
                await workers.call(end_by, signal.SIGSEGV)
            with pytest.raises(TextWorkersBusy, match=r": its process was killed by SIGKILL "):
                await workers.call(end_by, signal.SIGKILL)
            # Two run, three wait, the next is refused.
            heavy = [asyncio.ensure_future(workers.call(spin, heavy=True)) for _ in range(5)]
            await asyncio.sleep(0)
            with pytest.raises(TextWorkersBusy, match=r"^3\b"):
                await workers.call(count, "x", heavy=True)
            assert await asyncio.gather(*(workers.call(count, "hello") for _ in range(50))) == [5] * 50
            assert not any(task.done() for task in heavy), "light work waited for heavy work"
            for task in heavy[2:]:
                task.cancel()  # those that wait; a place is free when the work of the others has ended
            with pytest.raises(TextWorkLimit, match=r"\b2 s\b"):
                await heavy[0]
            assert await workers.call(count, "hello", heavy=True) == 5
            await asyncio.gather(*heavy, return_exceptions=True)
        finally:
            workers.close()

    asyncio.run(scenario())


def divide(tokenizer):
    return 1 // 0


def test_heavy_work_that_cannot_be_submitted_keeps_no_slot(monkeypatch):
    workers = TextWorkers(tiny_tokenizer, seconds=1.0)
    workers.started = True

    def fail(*_, **__):
        raise RuntimeError("the processes cannot be started")

    monkeypatch.setattr(workers.pool, "submit", fail)

    async def scenario():
        for _ in range(5):
            with pytest.raises(RuntimeError):
                await asyncio.wait_for(workers.call(count, "hello", heavy=True), timeout=1.0)

    asyncio.run(scenario())
