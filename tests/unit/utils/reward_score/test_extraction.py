"""The last box and the last tag of a response: nested, escaped, unclosed; and text without tagged blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.utils.reward_score.extraction import (
    last_boxed,
    last_boxed_only_string,
    last_tagged,
    remove_boxed,
    without_tagged,
)


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"so \boxed{72}.", "72"),
        (r"\boxed{1} or \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{x\right.}", r"\left\{x\right."),
        (r"\fbox{3}", "3"),
        (r"$\boxed 5$ apples", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{1} and \boxed{2", None),
        (r"\boxed", None),
        (r"\boxedin{3}", None),
        ("72", None),
        ("", None),
    ],
)
def test_what_stands_in_the_last_box(text, inside):
    assert last_boxed(text) == inside


def test_the_box_is_found_with_its_command_and_can_be_taken_off():
    assert last_boxed_only_string(r"so \boxed{\frac{1}{2}}.") == r"\boxed{\frac{1}{2}}"
    assert remove_boxed(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert remove_boxed("72") is None
    assert remove_boxed(None) is None


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("<answer>a</answer> <answer> b </answer>", "b"),
        ("<answer>a</answer> <answer>b", "a"),
        ("<answer>a <answer>b</answer></answer>", "b"),
        ("< Answer ><b></ANSWER >", "<b>"),
        ("</answer>a<answer>", None),
        ("<answers>a</answers>", None),
    ],
)
def test_the_last_whole_one_counts(text, inside):
    assert last_tagged(text, "answer") == inside


WORDS = st.sampled_from(["own ", "<x>", "</x>", "<", ">", "</y>"])


@given(st.lists(WORDS, max_size=6), st.lists(st.sampled_from(["foreign ", "</x>", "<y>"]), max_size=6), WORDS)
def test_nothing_of_a_block_is_left(before, block, last):
    own = "".join(word for word in before if "x" not in word)
    cut_off = "".join(word for word in block if word != "</x>")
    assert without_tagged(f"{own}<x>{cut_off}foreign", "x") == own
    kept = without_tagged(f"{own}<x>{''.join(block)}foreign</x>{last}", "x")
    assert "foreign" not in kept
    assert kept.startswith(own)
