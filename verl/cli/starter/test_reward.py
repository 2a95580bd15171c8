"""Tests of the reward and the tool: `python test_reward.py`, or `pytest`.

A wrong reward is the most common reason why a model does not learn, or learns the wrong thing: add the responses that
you expect, and those that must not score.
"""

from __future__ import annotations

from reward import compute_score, right_answer
from tools import calculate

from verl.tools.base_tool import ToolError


def test_the_right_answer_scores_1() -> None:
    assert compute_score("my_task", right_answer("12"), "12") == 1.0
    assert compute_score("my_task", "17 - 5\n#### 12", "12") == 1.0


def test_a_wrong_number_scores_less() -> None:
    assert compute_score("my_task", "#### 13", "12") == 0.1
    assert compute_score("my_task", "#### 12 #### 13", "12") == 0.1


def test_a_response_without_an_answer_scores_0() -> None:
    for response in ("", "12", "the answer is 12"):
        assert compute_score("my_task", response, "12") == 0.0


def test_the_calculator() -> None:
    assert calculate("(17 - 5) * 2") == "24"
    for expression in ("17 -", "print(1)", "1 / 0"):
        try:
            calculate(expression)
        except ToolError:
            continue
        raise AssertionError(expression)


if __name__ == "__main__":
    tests = [function for name, function in list(globals().items()) if name.startswith("test_")]
    for test in tests:
        test()
    print(f"{len(tests)} tests passed")
