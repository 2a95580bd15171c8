"""The prime manager: limits on time and memory, set by default, that hold in real processes.

Scorer processes import this file for the function in it: it imports nothing heavy.
"""

from __future__ import annotations

import inspect

import pytest


def by_answer(solution_str, ground_truth):
    while solution_str == "spin":
        pass
    if solution_str == "eat":
        return float(len([bytearray(2**24) for _ in range(64)]))
    return 1.0


def test_time_and_memory_have_limits_and_what_breaks_them_costs_itself(manager, batch):
    made = manager("prime", by_answer, timeout=1.0, memory_limit_gb=0.25, num_processes=2)
    result = made(batch(["a", "spin", "b", "eat", "c"]), return_dict=True)
    assert result["reward_extra_info"]["scoring_error"] == [None, "timeout", None, "memory", None]
    assert result["reward_tensor"].sum(-1).tolist() == [1.0, 0.0, 1.0, 0.0, 1.0]


def test_limits_are_there_without_being_asked_for():
    from verl.workers.reward_manager import get_reward_manager_cls

    limits = inspect.signature(get_reward_manager_cls("prime")).parameters
    assert (limits["timeout"].default, limits["memory_limit_gb"].default) == (10.0, 4.0)


@pytest.mark.parametrize("limit", ["timeout", "memory_limit_gb"])
def test_limits_that_leave_nothing_are_refused(manager, limit):
    with pytest.raises(ValueError, match=rf"reward_model\.reward_kwargs\.{limit}: 0"):
        manager("prime", **{limit: 0})
