"""Answers whose score is known: the ground truth against itself, and answers that name everything."""

from __future__ import annotations

from verl.utils.reward_score import default_compute_score
from verl.utils.reward_score.calls import check_ground_truth, correct_response, responses_with_all_answers


def test_good_ground_truths_score_one_and_bad_ones_say_why():
    assert check_ground_truth("openai/gsm8k", "72").problem is None
    assert "'two' is not a number" in check_ground_truth("openai/gsm8k", "two").problem
    assert "is empty" in check_ground_truth("math", "").problem
    assert "no equation" in check_ground_truth("countdown", {"target": 5, "numbers": [1, 1]}).problem
    assert check_ground_truth("hotpotqa", {"target": ["a b"]}).problem is None
    assert check_ground_truth("multiple_choice", "B").score == 1.0


def test_where_nothing_can_be_tried_there_is_no_verdict():
    assert check_ground_truth("nobody/knows", "72") is None
    assert correct_response("nobody/knows", "72") is None
    assert check_ground_truth("countdown", {"target": 5, "numbers": [1] * 9}) is None


def test_an_answer_that_names_everything_contains_the_truth_and_does_not_score():
    for source, truth in [("gsm8k", "7"), ("math", "7"), ("math", r"\frac12"), ("math_dapo", "7"), ("mmlu", "B")]:
        texts = responses_with_all_answers(source, truth, others=["13", "x+1"])
        assert all(truth in text for text in texts)
        for text in texts:
            told = default_compute_score(source, text, truth)
            assert (told["score"] if isinstance(told, dict) else told) == 0.0
