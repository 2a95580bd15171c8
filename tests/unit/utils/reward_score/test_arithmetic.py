"""The one number that a text states; the forms of `scorer_forms` say more."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.utils.reward_score.arithmetic import stated_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("**$1,234.50**", "1234.50"),
        ("The sum is 1.5 million.", "1500000.0"),
        (r"$m+n = 25+9 = 34$", "34"),
        (r"$m+n = 25+8 = 34$", None),
        ("72 clips in 2 months", "72"),
        ("72 clips or 2 months", None),
        ("1e9999", None),
        ("72 clips (70 + 2)", "72"),
        ("", None),
    ],
)
def test_a_number_is_read_with_what_belongs_to_it(text, number):
    assert stated_number(text) == number


@given(st.integers(-(10**15), 10**15), st.integers(2, 10**6), st.sampled_from(["{:,}", "${:,}$", "x = {}", "{} clips"]))
def test_a_number_alone_is_stated_and_one_of_two_is_not(number, other, form):
    text = form.format(number)
    assert Decimal(stated_number(text)) == number
    for second in (
        f"{text} or {other}",
        f"{text}, {other}",
        f"{number} * {other}",
        f"{number}/{other}",
        f"{other} {text}",
    ):
        assert stated_number(second) is None


@given(st.text(max_size=60))
def test_any_text_states_a_number_or_none(text):
    found = stated_number(text)
    assert found is None or Decimal(found).is_finite()
