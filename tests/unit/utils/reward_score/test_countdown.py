"""Countdown: every number once, the target exactly, and nothing the model writes is run."""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.utils.reward_score.arithmetic import evaluate
from verl.utils.reward_score.countdown import answer_of, compute_score

PUZZLE = {"target": 98, "numbers": [44, 19, 35]}


@pytest.mark.parametrize(
    "equation",
    ["44 + 19 + 35", "(44+19)+35", "44 + 19 + 35 = 98", "-(-44) + 19 + 35", "((44)) + (19 + 35)", "35 + 44 − -19"],
)
def test_solutions_score_one(equation):
    assert compute_score(f"<answer>{equation}</answer>", PUZZLE) == 1.0


@pytest.mark.parametrize(
    "equation",
    [
        "44 + 19",
        "44 + 19 + 35 + 35 - 35",
        "98",
        "44 + 19 + 35 = 97",
        "44 19 35",
        "44 + (19 + 35",
        "44 + 19 + 35)",
        "44 ** 19 ** 35",
        "44 // 19 + 35",
        "__import__('os').getpid()",
        "44 + 19 + 35; 1",
        "()",
        "",
        "= 98",
        "9" * 5000,
        "44*" * 5000 + "1",
        "(" * 5000 + "44" + ")" * 5000,
    ],
)
def test_everything_else_gets_the_score_of_the_format(equation):
    assert compute_score(f"<answer>{equation}</answer>", PUZZLE, format_score=0.1) == 0.1


def test_without_tags_there_is_no_answer():
    assert compute_score("44 + 19 + 35", PUZZLE, format_score=0.1) == 0.0


def test_fractions_are_exact_and_division_by_zero_is_no_solution():
    # 8 / (3 - 8 / 3) = 24 has no solution in integers on the way
    assert compute_score("<answer>8 / (3 - 8 / 3)</answer>", {"target": 24, "nums": [3, 3, 8, 8]}) == 1.0
    assert compute_score("<answer>8 ÷ (3 − 3)</answer>", {"target": 8, "nums": [3, 3, 8]}, format_score=0.1) == 0.1


def test_numbers_may_come_as_arrays():
    assert compute_score("<answer>1 + 2</answer>", {"target": np.int64(3), "numbers": np.array([1, 2])}) == 1.0


def test_a_ground_truth_that_is_no_puzzle_is_an_error():
    for wrong in ("98", {"target": 98}, {"numbers": [1]}, {"target": 98, "numbers": []}, None):
        with pytest.raises(
            ValueError, match=rf"^ground_truth {re.escape(repr(str(wrong)))}: .*\{{'target': 98, 'numbers'"
        ):
            compute_score("<answer>98</answer>", wrong)


def test_a_solution_is_found_where_there_is_one():
    hard = {"target": 24, "numbers": [3, 3, 8, 8]}
    assert compute_score(answer_of(hard), hard) == 1.0
    with pytest.raises(ValueError, match=r"\[1, 1\].*\b5\b"):
        answer_of({"target": 5, "numbers": [1, 1]})
    assert answer_of({"target": 5, "numbers": [1] * 8}) is None


TERMS = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda parts: f"({''.join(parts)})"),
    max_leaves=8,
)


@given(TERMS)
def test_values_are_those_of_arithmetic(equation):
    import re

    tokens = re.findall(r"\d+|[-+*/()]", equation)
    python = re.sub(r"(\d+)", r"Fraction(\1)", equation)
    try:
        expected = eval(python, {"Fraction": Fraction})
    except ZeroDivisionError:
        expected = None
    assert evaluate(tokens) == expected


def test_operators_bind_as_usual():
    for text, value in [("2 - 3 - 4", -5), ("2 - 3 * 4", -10), ("8 / 4 / 2", 1), ("- 2 * 3", -6), ("2 * - 3", -6)]:
        assert evaluate(text.split()) == value
    for text in ("( ) + 2", "( ) - 2", "2 * ( ) + 3", "( - ) 2"):
        assert evaluate(text.split()) is None
