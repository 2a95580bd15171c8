"""Unicode mathematics in LaTeX: signs, powers, roots, fractions and digits of any script; ASCII stays as it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.utils.reward_score.unicode_latex import as_latex


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
    assert as_latex(text) == latex


@given(st.text(max_size=40))
def test_any_text_has_a_spelling_and_ascii_keeps_its_own(text):
    spelled = as_latex(text)
    assert spelled == text or not text.isascii()
