"""Limits of tool calls: concurrency, rate, and length of the response."""

from __future__ import annotations

import asyncio
import time

import pytest

from verl.agent.tool_session import CallLimitError, CallThrottle, RateLimiter, truncate_text


def test_a_rate_limit_allows_one_second_of_calls_at_once_and_delays_further_ones():
    rate = RateLimiter(4)
    assert [rate.reserve(100.0) for _ in range(6)] == pytest.approx([0, 0, 0, 0, 0.25, 0.5])
    assert rate.reserve(200.0) == 0
    slow = RateLimiter(0.5)
    assert [slow.reserve(10.0), slow.reserve(10.0)] == pytest.approx([0, 2.0])


async def test_a_throttle_limits_concurrent_calls_and_fails_if_no_slot_becomes_free():
    throttle, running, most = CallThrottle({"num_workers": 3}), 0, 0

    async def work() -> None:
        nonlocal running, most
        async with throttle.slot(5.0):
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.001)
            running -= 1

    await asyncio.gather(*(work() for _ in range(30)))
    assert most == 3
    async with throttle.slot(1.0), throttle.slot(1.0), throttle.slot(1.0):
        with pytest.raises(CallLimitError, match=r"at once.*\b0\.01 s"):
            await _enter(throttle, 0.01)
    await _enter(throttle, 0.01)


async def test_a_throttle_limits_calls_per_second_and_rejects_those_that_would_wait_too_long():
    throttle = CallThrottle({"rate_limit": 20})
    start = time.monotonic()
    await asyncio.gather(*(_enter(throttle, 5.0) for _ in range(24)))
    assert time.monotonic() - start >= 0.19
    with pytest.raises(CallLimitError, match=r"\b20 calls per second.*\b0\.001 s"):
        await asyncio.gather(*(_enter(throttle, 0.001) for _ in range(30)))


async def test_a_call_without_limits_does_not_wait():
    async with CallThrottle({}).slot(0.0):
        pass


@pytest.mark.parametrize(
    ("side", "text"),
    [("left", "abcd...(truncated)"), ("right", "(truncated)...ghij"), ("middle", "ab...(truncated)...ij")],
)
def test_a_long_response_keeps_the_selected_side(side: str, text: str):
    assert truncate_text("abcdefghij", 4, side) == text
    assert truncate_text("abcd", 4, side) == "abcd"


def test_an_odd_length_and_the_shortest_one_are_exact():
    assert truncate_text("abcdefghij", 5, "middle") == "abc...(truncated)...ij"
    assert truncate_text("abcdefghij", 1, "middle") == "a...(truncated)..."


async def _enter(throttle: CallThrottle, seconds: float) -> None:
    async with throttle.slot(seconds):
        pass
