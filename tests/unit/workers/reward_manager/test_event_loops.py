"""Async reward functions: many under way at once on one event loop, and whatever one does costs its own sample."""

from __future__ import annotations

import pytest

from verl.utils.import_utils import load_user_object
from verl.workers.reward_manager.scorer import Sample, ScorerPool

# Does what the answer says.
FUNCTION = """
import asyncio, os, time

begun = []

async def score(solution_str, ground_truth, extra_info):
    if solution_str == "meet":
        begun.append(ground_truth)
        while len(begun) < extra_info["all"]:
            await asyncio.sleep(0.01)
        return {"score": float(len(begun)), "process": os.getpid()}
    if solution_str == "raise":
        raise KeyError("what was missing")
    if solution_str == "wait":
        await asyncio.sleep(1000)
    if solution_str == "block":
        time.sleep(1000)
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "lambda":
        return {"score": 1.0, "what": lambda: 0}
    await asyncio.sleep(0.2)
    return float(solution_str)
"""


@pytest.fixture
def function(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTION)
    return load_user_object(str(tmp_path / "mine.py"), "score", key="custom_reward_function.path")


@pytest.mark.parametrize("processes", [2, 0])
def test_many_are_under_way_at_once_on_one_loop(function, processes):
    samples = [Sample("mine", "meet", str(number), {"all": 200}) for number in range(200)]
    with ScorerPool(function, processes=processes, timeout=60) as pool:
        scores = pool.score(samples)
        assert pool.score([Sample("mine", "0.5", "")])[0].value == 0.5
    assert [score.value for score in scores] == [200.0] * 200
    assert len({score.extra["process"] for score in scores}) == 1


@pytest.mark.parametrize(
    ("bad", "kinds"),
    [
        (["raise", "wait", "nan", "lambda", "exit"], ["raised", "timeout", "invalid", "invalid", "died"]),
        pytest.param(["raise", "block", "exit"], ["raised", "timeout", "died"], marks=pytest.mark.slow),
    ],
)
def test_a_call_that_fails_in_any_way_costs_its_own_sample(function, bad, kinds):
    samples = [Sample("mine", answer, "") for answer in ["0.25", *bad, *["0.5"] * 20]]
    with ScorerPool(function, processes=1, timeout=1.0) as pool:
        futures = [pool.submit(sample) for sample in samples]
        scores = [future.result(timeout=60) for future in futures]
    assert [score.kind for score in scores] == [None, *kinds, *[None] * 20]
    assert [score.value for score in scores] == [0.25, *[0.0] * len(bad), *[0.5] * 20]
    assert "what was missing" in str(scores[1].error)


def test_a_function_of_lists_may_be_async(tmp_path):
    (tmp_path / "mine.py").write_text("async def score(solution_strs, ground_truths):\n    return [1.0, 0.0]\n")
    function = load_user_object(str(tmp_path / "mine.py"), "score", key="custom_reward_function.path")
    with ScorerPool(function, processes=1, timeout=60, takes_lists=True, batch_size=2) as pool:
        assert [score.value for score in pool.score([Sample("mine", "a", "")] * 2)] == [1.0, 0.0]
