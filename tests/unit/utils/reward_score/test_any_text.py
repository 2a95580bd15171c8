"""Whatever a model writes, every task answers with a number between 0 and 1, and long answers take no long time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.utils.reward_score import default_compute_score

TRUTHS = {
    "gsm8k": "72",
    "math": r"\frac{1}{2}",
    "math_dapo": "34",
    "hotpotqa": {"target": ["the Paris of X", ""]},
    "countdown": {"target": 98, "numbers": [44, 19, 35]},
    "mmlu": "B",
}
# Pieces that the readers look for, in any order.
PIECES = st.sampled_from(
    ["####", r"\boxed{", r"\boxed ", "{", "}", "<answer>", "</answer>", "<information>", "</information>", "Answer:"]
    + [
        "answer is",
        "72",
        "-",
        ",",
        ".",
        "1,000",
        " ",
        "\n",
        "(",
        ")",
        "=",
        "$",
        "\\",
        r"\frac",
        r"\text{",
        "B",
        "%",
        "^",
    ]
    + [
        "²",
        "٣",
        "\x00",
        "\ud800",
        "½",
        "：",
        "/0",
        "_",
        "!",
        "√",
        "−",
        "→",
        "✅",
        "e999",
        r"\approx",
        r"\over",
        "million",
    ]
    + ["**", "`", "'", "<b>", "I choose ", "is the answer", " or ", " is ", "+", "x", "[", "]", r"\,", "~", ":"]
)
LENGTH = 100_000
LONG = {
    "digits": "#### " + "7" * LENGTH,
    "thousands": "#### " + "1,111" * (LENGTH // 5),
    "number before a slash": "#### " + "1" * LENGTH + " /",
    "spaces": "####" + " " * LENGTH,
    "signs": "#### " + "-" * LENGTH,
    "marks": "####" * (LENGTH // 4),
    "boxes that never close": r"\boxed{" * (LENGTH // 7),
    "boxes in boxes": r"\boxed{" * (LENGTH // 14) + "}" * (LENGTH // 14),
    "one long box": r"\boxed{" + r"\frac{1}{2}+ " * (LENGTH // 13) + "}",
    "backslashes": "\\boxed{" + "\\" * LENGTH + "}",
    "a box of spaces": "\\boxed{" + " " * LENGTH + "}",
    "a box of braces": "\\boxed{" + "{" * (LENGTH // 2) + "}" * (LENGTH // 2) + "}",
    "answers": "Answer: " * (LENGTH // 8),
    "answers without a colon": "answer" + " " * 7 + "answer*" * (LENGTH // 7),
    "answer and lines": "Answer:" + "\n" * LENGTH,
    "tags": "<answer>" * (LENGTH // 16) + "</answer>" * (LENGTH // 18),
    "informations": "<information>" * (LENGTH // 13),
    "sums": "<answer>" + "44+" * (LENGTH // 3) + "1</answer>",
    "brackets": "<answer>" + "(" * (LENGTH // 2) + ")" * (LENGTH // 2) + "</answer>",
    "words": "<answer>" + "the " * (LENGTH // 4) + "</answer>",
    "letters": "Answer: " + "(A) " * (LENGTH // 4),
    "a sum of names": "#### " + "a + " * (LENGTH // 4) + "!",
    "an equation of many sides": r"\boxed{" + "x=" * 900 + "}",
    "dollars around dollars": "Answer: " + "$" * LENGTH,
    "opening signs": "<" * LENGTH,
    "lines without an answer": "so it is not\n" * (LENGTH // 13),
    "a last line of brackets": "x\n" + "(A" * (LENGTH // 2),
}


def value(source: str, text: str) -> float:
    told = default_compute_score(source, text, TRUTHS[source], {"choices": ["a", "b", "c"]})
    return told["score"] if isinstance(told, dict) else told


@pytest.mark.parametrize("source", TRUTHS)
@settings(max_examples=60)
@given(text=st.one_of(st.text(max_size=60), st.lists(PIECES, max_size=25).map("".join)))
def test_any_text_gets_a_score(source, text):
    assert 0.0 <= value(source, text) <= 1.0


# The limit is a hundred times what they need: it only says that they end.
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", LONG)
def test_long_answers_are_read_in_one_go(kind):
    for source in TRUTHS:
        assert value(source, LONG[kind]) == 0.0
