"""Responses with a known score, to check a reward function: correct, empty, and with many answers at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl.utils.reward_score.calls import score_row
from verl.utils.reward_score.registry import score_function

EMPTY = ""
_DECOYS = 40


@dataclass(frozen=True)
class Trial:
    """The score of a row's ground truth as a response."""

    score: float
    problem: str | None  # None: it scores 1, as it must


def correct_response(data_source: str, ground_truth: Any) -> str | None:
    """Format the ground truth as a correct response; None if no function is known or it cannot be formatted.

    ValueError: the ground truth is invalid.
    """
    try:
        format_answer = score_function(data_source).answer
    except ValueError:
        return None
    return None if format_answer is None else format_answer(ground_truth)


def try_ground_truth(data_source: str, ground_truth: Any, extra_info: Any = None) -> Trial | None:
    """Score the ground truth of a row as a response; None if it cannot be formatted as one."""
    try:
        answer = correct_response(data_source, ground_truth)
    except (ValueError, TypeError) as error:
        return Trial(0.0, f"cannot be scored ({error})")
    if answer is None:
        return None
    row = {"data_source": data_source, "solution_str": answer, "ground_truth": ground_truth, "extra_info": extra_info}
    value, _, failure, _ = score_row(score_function(data_source).compute, row)
    if failure is not None:
        return Trial(0.0, f"cannot be scored ({failure.splitlines()[-1]})")
    return Trial(value, None if value == 1.0 else f"scores {value:g} against itself, not 1")


def responses_with_all_answers(data_source: str, ground_truth: Any, others: Sequence[Any] = ()) -> list[str]:
    """Responses that list many answers, including the correct one: plain, and in the expected format if possible.

    The correct one is neither first nor last. `others`: correct answers of other rows.
    """
    truth = str(ground_truth)
    candidates = [*map(str, range(1, _DECOYS)), *map(str, others)]
    if len(truth) == 1 and truth.isalpha():
        candidates = list("ABCDEFGHIJ")
    decoys = [candidate for candidate in dict.fromkeys(candidates) if candidate != truth]
    middle = len(decoys) // 2
    text = ", ".join([*decoys[:middle], truth, *decoys[middle:]])
    try:
        formatted = correct_response(data_source, text) if isinstance(ground_truth, str) else None
    except (ValueError, TypeError):
        formatted = None
    return [text] if formatted is None else [text, formatted]
