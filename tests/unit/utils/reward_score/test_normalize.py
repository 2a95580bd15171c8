"""Mathematical answers in one spelling: what differs in layout, units or notation only becomes equal, nothing else."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.utils.reward_score import default_compute_score
from verl.utils.reward_score.normalize import (
    LAYOUT_COMMANDS,
    SPACE_COMMANDS,
    normalize_math,
    parse_number,
    unicode_to_latex,
)


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
    assert {normalize_math(spelling) for spelling in spellings} == {normal}


def test_what_means_something_is_kept():
    assert normalize_math("3 4") == "3 4"  # not 34
    assert normalize_math("(1,234)") == "(1,234)"  # two numbers, not a thousand
    assert normalize_math("3*4") == "3*4"
    assert normalize_math("2 xy") == "2xy"  # no unit
    assert normalize_math("x + y = 0") == "x+y=0"  # an equation, not a value with a name
    assert normalize_math(r"8\!:\!34 \text{ p.m.}") != normalize_math(r"8\!:\!34 \text{ a.m.}")
    assert normalize_math(r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}") == r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"


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
    assert parse_number(text) == value


@given(st.fractions(), st.integers(0, 10**9))
def test_a_number_has_one_value_in_every_notation(value, whole):
    n, d = value.numerator, value.denominator
    assert parse_number(normalize_math(f"\\dfrac{{{n}}}{{{d}}}")) == value
    assert parse_number(normalize_math(f"{n}/{d}")) == value
    assert parse_number(normalize_math(f"${whole:,}$")) == whole
    assert parse_number(normalize_math(f"\\${whole:,}.50")) == whole + Fraction(1, 2)


@given(st.text(max_size=80))
def test_normalising_twice_changes_nothing_that_counts_and_never_fails(text):
    parse_number(normalize_math(text))
    assert normalize_math("x" * 2000 + text).startswith("x" * 2000)


@pytest.mark.parametrize("command", [*LAYOUT_COMMANDS, *SPACE_COMMANDS])
def test_every_scorer_ignores_the_same_layout_commands(command):
    puzzle = {"target": 18, "numbers": [3, 4, 2]}
    assert default_compute_score("openai/gsm8k", f"#### x = {command} 72 {command}", "72") == 1.0
    assert default_compute_score("math_dapo", f"Answer: The sum is {command} 72.", "72")["score"] == 1.0
    assert default_compute_score("lighteval/MATH", f"\\boxed{{{command} 72 {command}}}", "72") == 1.0
    assert default_compute_score("countdown", f"<answer>3 * {command}(4 + 2{command})</answer>", puzzle) == 1.0
    assert default_compute_score("openai/gsm8k", f"#### 72 {command} 73", "72") == 0.0


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("−5", "-5"),
        ("3½", r"3\frac{1}{2}"),
        ("x²+y¹²", "x^{2}+y^{12}"),
        ("2ⁿ⁻¹", "2^{n-1}"),
        ("a₁₂", "a_{12}"),
        ("√2", r"\sqrt{2}"),
        ("2√(x+1)", r"2\sqrt{x+1}"),
        ("∛13", r"\sqrt[3]{13}"),
        ("３４ ٣٤", "34 34"),
        ("π≤Δ", r"\pi \leq \Delta "),
        ("1\u202f234", r"1\,234"),
        ("（1，2）", "(1,2)"),
        ("5 ✅\u200b", "5 "),
    ],
)
def test_unicode_becomes_latex(text, latex):
    assert unicode_to_latex(text) == latex


@given(st.text(max_size=40))
def test_any_text_has_a_spelling_and_ascii_keeps_its_own(text):
    spelled = unicode_to_latex(text)
    assert spelled == text or not text.isascii()
