"""GSM8K: the number after `####` is the answer (Cobbe et al., arXiv 2110.14168)."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from verl.utils.reward_score.arithmetic import stated_number
from verl.utils.reward_score.registry import register_score

_MARK = "####"
_ANY_NUMBER = re.compile(r"(?<![\d)])-?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)", re.ASCII)


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The answer in a response, without separators and currency; None if there is none.

    `strict`: the one number that the line after the last `####` states (`arithmetic.stated_number`). `flexible`: the
    last number of the response.
    """
    if method == "strict":
        line = _line_after_mark(solution_str)
        return None if line is None else stated_number(line)
    if method == "flexible":
        numbers = _ANY_NUMBER.findall(solution_str.replace("−", "-"))
        return _plain(numbers[-1]) if numbers else None
    raise ValueError(f"method: {method!r} is unknown. Use strict or flexible.")


def answer_of(ground_truth: object) -> str:
    """A correct response in the strict format."""
    return f"#### {ground_truth}"


@register_score("openai/gsm8k", "gsm8k", answer=answer_of, extract=extract_solution)
def compute_score(
    solution_str: str, ground_truth: str, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for the correct number, `format_score` for a wrong number, 0 without a number."""
    truth = _parse_truth(ground_truth)
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if Decimal(answer) == truth else format_score


def _line_after_mark(text: str) -> str | None:
    """The rest of the line after the last `####`, or the next non-empty line. A closing `####` (`#### 72 ####`) is
    ignored."""
    text = text.rstrip()
    if text.endswith(_MARK) and _MARK in text.rpartition("\n")[2].rstrip("#"):
        text = text.rstrip("#")
    _, mark, after = text.rpartition(_MARK)
    return after.lstrip().partition("\n")[0] if mark else None


def _parse_truth(ground_truth: object) -> Decimal:
    try:
        return Decimal(_plain(str(ground_truth)))
    except InvalidOperation as error:
        raise ValueError(f"ground_truth {ground_truth!r} is not a number. Correct the row.") from error


def _plain(number: str) -> str:
    return re.sub(r"[,$\s]", "", number)
