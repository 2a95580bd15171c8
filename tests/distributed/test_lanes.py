"""Two lanes per worker process: control answers, and cancels, while compute is busy."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from verl.single_controller.base import CallCancelled, WorkerCallError


def test_control_calls_answer_during_a_long_compute_call_and_cancel_it(ray_counters):
    future = ray_counters.long_compute(120.0)
    while ray_counters.running() != ["long_compute"] * 2:
        time.sleep(0.01)
    for _ in range(20):
        ray_counters.ping()
    assert ray_counters.running() == ["long_compute"] * 2, "control must not wait for the compute call"
    assert ray_counters.cancel() == [True, True]
    with pytest.raises(WorkerCallError, match=r"long_compute") as caught:
        future.get()
    assert isinstance(caught.value.__cause__, CallCancelled)
    assert ray_counters.cancel() == [False, False], "nothing is running any more"
    assert ray_counters.add(0), "the group is usable after a cancelled call"


def test_a_control_call_runs_beside_another_that_waits_for_it(counters):
    with ThreadPoolExecutor(max_workers=1) as pool:
        waiting = pool.submit(counters.wait_for_release)
        while not all(counters.is_waiting()):
            assert not waiting.done(), waiting.result()
            time.sleep(0.01)
        counters.release()
        assert waiting.result() == ["released"] * counters.world_size


def test_async_methods_share_a_loop_and_answer_while_compute_is_busy(ray_counters):
    busy = ray_counters.long_compute(120.0)
    with ThreadPoolExecutor(max_workers=1) as pool:
        waiting = pool.submit(ray_counters.wait_for_message)
        heard = [False, False]  # a rank may begin to wait after the other has heard
        while not all(heard):
            assert not waiting.done(), waiting.result()
            heard = [a or b for a, b in zip(heard, ray_counters.send_message("all is well"), strict=True)]
            time.sleep(0.05)
        assert waiting.result() == ["all is well"] * 2
    ray_counters.cancel()
    with pytest.raises(WorkerCallError, match="CallCancelled"):
        busy.get()


def test_a_cancel_does_not_touch_the_next_call(ray_counters):
    ray_counters.cancel()
    assert ray_counters.long_compute(0.05).get() == ["finished"] * 2
