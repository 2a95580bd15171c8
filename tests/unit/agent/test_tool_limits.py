"""Limits of tool calls: how many at once, how many per second, how much of the answer is seen."""

from __future__ import annotations

import asyncio
import time

import pytest

from verl.agent.tool_limits import Gate, LimitError, Rate, truncated


def test_a_rate_lets_one_second_of_calls_start_at_once_and_spaces_the_rest():
    rate = Rate(4)
    assert [rate.delay(100.0) for _ in range(6)] == pytest.approx([0, 0, 0, 0, 0.25, 0.5])
    assert rate.delay(200.0) == 0
    slow = Rate(0.5)
    assert [slow.delay(10.0), slow.delay(10.0)] == pytest.approx([0, 2.0])


async def test_a_gate_bounds_calls_at_once_and_says_when_none_came_free():
    gate, running, most = Gate({"num_workers": 3}), 0, 0

    async def work() -> None:
        nonlocal running, most
        async with gate.place(5.0):
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.001)
            running -= 1

    await asyncio.gather(*(work() for _ in range(30)))
    assert most == 3
    async with gate.place(1.0), gate.place(1.0), gate.place(1.0):
        with pytest.raises(LimitError, match=r"too many calls at once; none ended within 0.01 s"):
            await _enter(gate, 0.01)
    await _enter(gate, 0.01)


async def test_a_gate_bounds_calls_per_second_and_refuses_at_once_what_would_wait_too_long():
    gate = Gate({"rate_limit": 20})
    begun = time.monotonic()
    await asyncio.gather(*(_enter(gate, 5.0) for _ in range(24)))
    assert time.monotonic() - begun >= 0.19
    with pytest.raises(LimitError, match=r"more than 20 calls per second; no start within 0.001 s"):
        await asyncio.gather(*(_enter(gate, 0.001) for _ in range(30)))


async def test_a_call_without_limits_waits_for_nothing():
    async with Gate({}).place(0.0):
        pass


@pytest.mark.parametrize(
    ("side", "text"),
    [("left", "abcd...(truncated)"), ("right", "(truncated)...ghij"), ("middle", "ab...(truncated)...ij")],
)
def test_a_long_answer_keeps_the_side_that_is_asked_for(side: str, text: str):
    assert truncated("abcdefghij", 4, side) == text
    assert truncated("abcd", 4, side) == "abcd"


def test_an_odd_length_and_the_shortest_one_are_kept_whole():
    assert truncated("abcdefghij", 5, "middle") == "abc...(truncated)...ij"
    assert truncated("abcdefghij", 1, "middle") == "a...(truncated)..."


async def _enter(gate: Gate, seconds: float) -> None:
    async with gate.place(seconds):
        pass
