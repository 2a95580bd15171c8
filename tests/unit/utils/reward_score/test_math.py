"""MATH: the answer in the last box, compared as text, as a number, or as mathematics."""

from __future__ import annotations

import sys

import pytest

from verl.utils.reward_score import math as task
from verl.utils.reward_score.math import compute_score, extract_solution, is_equiv


def test_right_wrong_and_unboxed_answers_score_as_asked():
    assert compute_score(r"so \boxed{\frac12}", "0.5") == 1.0
    assert compute_score(r"so \boxed{\frac13}", "0.5") == 0.0
    assert compute_score(r"so \boxed{\frac13}", "0.5", format_score=0.1) == 0.1
    assert compute_score("so 0.5", "0.5", format_score=0.1) == 0.0
    assert compute_score(r"\boxed{5}", "5", score=2.0) == 2.0
    assert compute_score(r"\boxed{}", "5") == 0.0
    assert compute_score(r"\boxed{5} no, \boxed{6}", "5") == 0.0
    assert compute_score(r"\boxed{5}", 5) == 1.0
    assert compute_score(r"\boxed{5}", r"We get 2+3 = \boxed{5}.") == 1.0  # some data holds whole solutions
    assert extract_solution("5") is None


@pytest.mark.parametrize(
    ("answer", "truth", "equal"),
    [
        ("0.5", r"\frac{1}{2}", True),
        ("1{,}000", "1000", True),
        (r"\frac{3}{6}", r"\frac12", True),
        ("50\\%", "0.5", True),
        ("0.5", "50\\%", True),
        ("50", "50\\%", True),
        ("5", "50\\%", False),
        (r"\$18.90", "18.90", True),
        ("025", "25", True),
        ("4343_{6}", "4343_6", True),
        ("4343", "4343_6", True),
        ("4343_5", "4343_6", False),
        (r"\text{A5}_{11}", "A5_{11}", True),
        ("3", "4", False),
        (".00006727", ".0000672", False),
        ("0.0001", "0", False),
        ("0.33", r"\frac13", False),
        ("", "4", False),
        ("0.56", r"0.56 = 56\%", True),
        (r"56\%", r"0.56 = 56\%", True),
        (r"0.56 = 57\%", r"0.56 = 56\%", False),
    ],
)
def test_text_and_numbers_are_decided_without_math_verify(monkeypatch, answer, truth, equal):
    monkeypatch.setattr(task, "symbolically_equal", lambda *_: pytest.fail("it was asked"))
    assert is_equiv(answer, truth) is equal


def test_everything_else_is_compared_as_mathematics():
    pytest.importorskip("math_verify", reason="needs math-verify (pip install math-verify)")
    assert compute_score(r"\boxed{(x-1)(x+1)}", "x^2-1") == 1.0
    assert compute_score(r"\boxed{(x-1)(x+2)}", "x^2-1") == 0.0
    assert compute_score(r"\boxed{0.3333333}", r"\frac13") == 1.0
    assert compute_score(r"\boxed{0.56 = 56\% + 1}", r"0.56 = 56\%") == 0.0
    assert compute_score(r"\boxed{" + ", ".join(map(str, range(60))) + "}", "7") == 0.0


def test_without_math_verify_the_error_names_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ModuleNotFoundError, match="pip install math-verify"):
        compute_score(r"\boxed{(x-2)(x+2)}", "x^2-4")


def test_an_empty_ground_truth_is_an_error():
    for empty in ("", " ", None):
        with pytest.raises(ValueError, match=rf"^ground_truth {empty!r} "):
            compute_score(r"\boxed{5}", empty)
