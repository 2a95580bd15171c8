"""The last box of a text: nested and escaped braces, boxes without braces, and boxes that never close."""

from __future__ import annotations

import pytest

from verl.utils.reward_score.marked import last_boxed, last_boxed_only_string, remove_boxed


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
