"""The batch manager: one call for many answers; a failed call costs its answers, a bad item its own.

Scorer processes import this file for the functions in it: it imports nothing heavy.
"""

from __future__ import annotations

import math
import os

import pytest

from verl.utils.progress import Progress, record_progress


def lengths(data_sources, solution_strs, ground_truths, extra_infos):
    assert len(data_sources) == len(solution_strs) == len(ground_truths) == len(extra_infos)
    return [
        {"score": len(text), "together": len(solution_strs), "index": extra["index"]}
        for text, extra in zip(solution_strs, extra_infos, strict=True)
    ]


@pytest.mark.parametrize(
    ("processes", "size", "together"), [(2, None, [5] * 5), (2, 2, [2, 2, 2, 2, 1]), (0, 2, [2, 2, 2, 2, 1])]
)
def test_the_function_gets_lists_of_the_size_asked_for_and_scores_keep_their_order(
    manager, batch, processes, size, together
):
    score, progress = manager("batch", lengths, batch_size=size, num_processes=processes), Progress()
    with record_progress(progress):
        result = score(batch(["a", "bb", "ccc", "d", ""]), return_dict=True)
    assert progress.read() == (5, 5), "answers, not calls"
    assert result["reward_tensor"].sum(-1).tolist() == [1.0, 2.0, 3.0, 1.0, 0.0]
    assert result["reward_extra_info"]["together"] == together
    assert result["reward_extra_info"]["index"] == [0, 1, 2, 3, 4]
    assert result["reward_extra_info"]["scoring_failed"] == [0.0] * 5


def test_a_function_may_leave_out_what_it_does_not_need(manager, batch):
    def scores(solution_strs, ground_truths):
        return [float(truth) for truth in ground_truths]

    assert manager("batch", scores, num_processes=0)(batch(["a", "b"])).sum(-1).tolist() == [72.0, 72.0]


def failing(solution_strs, **_):
    if "raise" in solution_strs:
        raise KeyError("what was missing")
    if "exit" in solution_strs:
        os._exit(3)
    if "short" in solution_strs:
        return [1.0]
    if "text" in solution_strs:
        return "11"
    return [math.nan if text == "nan" else 1.0 for text in solution_strs]


def test_a_failed_call_costs_the_answers_that_were_in_it_and_a_bad_item_its_own(manager, batch):
    texts = ["a", "raise", "exit", "b", "short", "c", "text", "d", "e", "nan", "f", "g"]
    result = manager("batch", failing, batch_size=2, num_processes=2)(batch(texts), return_dict=True)
    bad = [*["raised"] * 2, *["died"] * 2, *["raised"] * 2, *["raised"] * 2, None, "invalid", None, None]
    assert result["reward_extra_info"]["scoring_error"] == bad
    assert result["reward_tensor"].sum(-1).tolist() == [float(kind is None) for kind in bad]


def test_one_answer_is_a_list_of_one(manager, sample):
    made = manager("batch", failing, num_processes=1)
    assert made.submit(sample("mine", "fine", "")).result().value == 1.0
    assert made.submit(sample("mine", "nan", "")).result().kind == "invalid"
    assert "what was missing" in made.submit(sample("mine", "raise", "")).result().error


def test_without_a_function_of_the_user_answers_are_scored_one_by_one(manager, batch, sample):
    made = manager("batch", num_processes=0)
    assert made(batch(["#### 72", "#### 73"])).sum(-1).tolist() == [1.0, 0.0]
    assert made.submit(sample("openai/gsm8k", "#### 1", "1")).result().value == 1.0


def test_a_batch_of_no_answers_is_refused(manager):
    with pytest.raises(ValueError, match=r"reward_model\.reward_kwargs\.batch_size"):
        manager("batch", lengths, batch_size=0)
