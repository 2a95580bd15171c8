"""Mathematical answers in one spelling: what differs in layout, units or notation only becomes equal, nothing else."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.utils.reward_score.latex_answer import MOST_CHARACTERS, as_number, normalised


@pytest.mark.parametrize(
    ("spellings", "normal"),
    [
        ([r"\frac34", r"\dfrac{3}{4}", r"\tfrac34", r"\frac 34", r"\frac{3}4", r"$\frac{3}{4}$."], r"\frac{3}{4}"),
        ([r"4,\!989,\!600", "4,989,600", "4{,}989{,}600", r"4\,989\,600", "4989600"], "4989600"),
        ([r"\$3.60", "$3.60", r"3.60\%", "3.60 %", r"3.60^\circ", r"3.60^{\circ}", "**3.60**"], "3.60"),
        ([r"864 \mbox{ inches}^2", r"864\text{ square inches}", "864 square inches", "864 feet."], "864"),
        ([r"\text{Tuesday}", "Tuesday", r"\mathrm{Tuesday}"], "tuesday"),
        ([r"\text{(E)},", "E", "(E)"], "E"),
        (["x = 5", "x=5", "5", r"f(x) = 5"], "5"),
        ([r"2, 3, \text{ and } 4", "2, 3, 4", "2, 3 and 4"], "2,3,4"),
        ([r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"], r"(3,\frac{\pi}{2})"),
        ([r"2\sqrt3", r"2 \sqrt{3}"], r"2\sqrt{3}"),
    ],
)
def test_spellings_of_the_same_answer_become_equal(spellings, normal):
    assert {normalised(spelling) for spelling in spellings} == {normal}


def test_what_means_something_is_kept():
    assert normalised("3 4") == "3 4"  # not 34
    assert normalised("(1,234)") == "(1,234)"  # two numbers, not a thousand
    assert normalised("3*4") == "3*4"
    assert normalised("2 xy") == "2xy"  # no unit
    assert normalised("x + y = 0") == "x+y=0"  # an equation, not a value with a name
    assert normalised(r"8\!:\!34 \text{ p.m.}") != normalised(r"8\!:\!34 \text{ a.m.}")
    assert normalised(r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}") == r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-7", Fraction(-7)),
        ("025", Fraction(25)),
        (".5", Fraction(1, 2)),
        ("3.", Fraction(3)),
        ("3/4", Fraction(3, 4)),
        ("-\\frac{3}{4}", Fraction(-3, 4)),
        ("-15\\frac{3}{5}", Fraction(-78, 5)),
        ("\\frac{1}{0}", None),
        ("1/0", None),
        ("1,2", None),
        ("x", None),
        ("", None),
        ("1e5", Fraction(100000)),
        ("1.5e-1", Fraction(3, 20)),
        ("3\\cdot10^{5}", Fraction(300000)),
        ("1 1/2", Fraction(3, 2)),
        ("3 4", None),
        ("1e9999", None),
    ],
)
def test_plain_numbers_have_their_exact_value(text, value):
    assert as_number(text) == value


@given(st.fractions(), st.integers(0, 10**9))
def test_a_number_has_one_value_in_every_notation(value, whole):
    n, d = value.numerator, value.denominator
    assert as_number(normalised(f"\\dfrac{{{n}}}{{{d}}}")) == value
    assert as_number(normalised(f"{n}/{d}")) == value
    assert as_number(normalised(f"${whole:,}$")) == whole
    assert as_number(normalised(f"\\${whole:,}.50")) == whole + Fraction(1, 2)


@given(st.text(max_size=80))
def test_normalising_twice_changes_nothing_that_counts_and_never_fails(text):
    as_number(normalised(text))
    assert normalised("x" * MOST_CHARACTERS + text).startswith("x" * MOST_CHARACTERS)
