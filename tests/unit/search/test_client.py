"""CircuitBreaker: the state machine, with a simulated clock."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from verl.search.client import CircuitBreaker


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def open_breaker(failures=3, cooldown_s=10.0):
    clock = Clock()
    breaker = CircuitBreaker(failures, cooldown_s, clock)
    for _ in range(failures):
        assert breaker.allow()
        breaker.failed()
    return breaker, clock


def test_it_opens_after_failures_in_a_row_only():
    breaker = CircuitBreaker(failures=3, clock=Clock())
    for _ in range(5):
        breaker.failed()
        breaker.failed()
        breaker.succeeded()
    assert breaker.state == "closed"
    breaker, _ = open_breaker()
    assert breaker.state == "open"
    assert not breaker.allow()
    assert breaker.wait_s() == 10.0


def test_one_probe_at_a_time_decides():
    breaker, clock = open_breaker()
    clock.now = 10.0
    assert breaker.state == "half-open"
    assert breaker.allow()
    assert not breaker.allow()
    breaker.failed()
    assert breaker.state == "open"
    assert breaker.wait_s() == 10.0
    clock.now = 20.0
    assert breaker.allow()
    breaker.succeeded()
    assert breaker.state == "closed"
    assert breaker.allow()
    assert breaker.allow()


def test_an_abandoned_probe_allows_the_next_one():
    breaker, clock = open_breaker()
    clock.now = 10.0
    assert breaker.allow()
    breaker.abandoned()
    assert breaker.allow()


@given(st.lists(st.sampled_from(["request", "succeeded", "failed", "abandoned", "wait"]), max_size=60))
def test_it_always_probes_again_but_never_more_often_than_the_cooldown(events):
    clock = Clock()
    breaker = CircuitBreaker(2, 10.0, clock)
    requests = []
    for event in events:
        if event == "request" and breaker.state != "closed" and breaker.allow():
            requests.append(clock.now)
            breaker.failed()
        elif event == "wait":
            clock.now += 3.0
        elif event != "request":
            getattr(breaker, event)()
            requests = [] if event == "succeeded" else requests
    assert all(later - earlier >= 10.0 for earlier, later in itertools.pairwise(requests))
    breaker.abandoned()
    clock.now += 10.0
    assert breaker.allow()
