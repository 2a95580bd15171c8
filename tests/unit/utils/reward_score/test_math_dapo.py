"""DAPO-Math and AIME: the last `Answer:` line, compared as a number; accuracy and the answer found are told."""

from __future__ import annotations

import pytest

from verl.utils.reward_score.math_dapo import compute_score, extract_solution


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("So it is 34.\nAnswer: 34", "34"),
        ("Answer: 33\nno\nAnswer: $34$.", "$34$."),
        ("**Answer:** 34", "** 34"),
        ("**Answer**: 34", "34"),
        ("Final answer：34", "34"),
        (r"Answer: \boxed{34}", "34"),
        ("Answer:\n\\[\n34\n\\]", "34"),
        (r"we get \boxed{34}.", "34"),
        (r"\boxed{33} Answer: 34", "34"),
        ("34", None),
        ("Answer:", None),
        ("", None),
    ],
)
def test_the_answer_is_found(text, found):
    assert extract_solution(text) == found


@pytest.mark.parametrize("answer", ["34", "$34$", "34.", "**34**", "n = 34", "034", "34.0", r"\boxed{34}", "34 units"])
def test_spellings_of_the_right_number_score_one(answer):
    assert compute_score(f"Answer: {answer}", "34") == {"score": 1.0, "acc": 1.0, "pred": "34"}


@pytest.mark.parametrize("answer", ["35", "-34", "3 4", "33, 34, 35", "34/2", "not 34", "34 35", "34^2"])
def test_other_answers_score_zero(answer):
    told = compute_score(f"Answer: {answer}", "34")
    assert (told["score"], told["acc"]) == (0.0, 0.0)


def test_scores_of_the_paper_are_a_setting():
    paper = {"format_score": -1.0, "no_answer_score": -1.0}
    assert compute_score("Answer: 34", "34", **paper)["score"] == 1.0
    assert compute_score("Answer: 35", "34", **paper)["score"] == -1.0
    assert compute_score("I do not know", "34", **paper) == {"score": -1.0, "acc": 0.0, "pred": None}


def test_an_empty_ground_truth_is_an_error():
    with pytest.raises(ValueError, match=r"^ground_truth ''"):
        compute_score("Answer: 34", "")
