"""Tags: the last whole answer counts, and nothing of what stands in a block is left, whether it closes or not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.utils.reward_score.marked import last_tagged, without_tagged


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
