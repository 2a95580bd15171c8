"""Two lanes per worker process: control answers, and cancels, while compute is busy."""

from __future__ import annotations

import statistics
import time

import pytest

from verl.single_controller.base import CallCancelled, WorkerCallError


def test_control_calls_answer_during_a_long_compute_call_and_cancel_it(ray_counters):
    future = ray_counters.long_compute(10.0)
    while ray_counters.running() != ["long_compute"] * 2:
        time.sleep(0.01)
    answers = []
    for _ in range(20):
        start = time.monotonic()
        ray_counters.ping()
        answers.append(time.monotonic() - start)
    assert statistics.median(answers) < 0.05, "control must not wait for the compute call"
    start = time.monotonic()
    assert ray_counters.cancel() == [True, True]
    with pytest.raises(WorkerCallError, match="CallCancelled: long_compute was cancelled") as caught:
        future.get()
    assert isinstance(caught.value.__cause__, CallCancelled)
    assert time.monotonic() - start < 5, "cancelling must end the 10 s call early"
    assert ray_counters.cancel() == [False, False], "nothing is running any more"
    assert ray_counters.add(0), "the group is usable after a cancelled call"


def test_a_cancel_does_not_touch_the_next_call(ray_counters):
    ray_counters.cancel()
    assert ray_counters.long_compute(0.05).get() == ["finished"] * 2
