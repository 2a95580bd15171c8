"""GSM8K: the number after `####` is the answer (Cobbe et al., arXiv 2110.14168)."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from verl.utils.reward_score.registry import register_score

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
# What follows must not go on with the number: `72/3`, `72 + 1`, `1,2,3` and `3.1.4` are not answers.
_STRICT = re.compile(rf"####\s*((?:-\s?\$?|\$\s?-?)?{_DIGITS})(?!\d|[,.]\d|\s*[-+*/^]\s*\d)")
_ANY_NUMBER = re.compile(rf"-?{_DIGITS}")


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The answer in a text, without separators and currency; None if there is none.

    `strict`: the number after the last `####`, and none if no number follows it. `flexible`: the last number of all.
    """
    if method == "strict":
        start = solution_str.rfind("####")
        found = _STRICT.match(solution_str, start) if start >= 0 else None
        return _plain(found.group(1)) if found else None
    if method == "flexible":
        numbers = _ANY_NUMBER.findall(solution_str)
        return _plain(numbers[-1]) if numbers else None
    raise ValueError(f"method: {method!r} is not known. Use strict or flexible.")


def answer_of(ground_truth: object) -> str:
    """A right answer in the strict format."""
    return f"#### {ground_truth}"


@register_score("openai/gsm8k", "gsm8k", answer=answer_of, extract=extract_solution)
def compute_score(
    solution_str: str, ground_truth: str, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for the right number, `format_score` for a wrong one in the right format, 0 where none is found."""
    truth = _number(ground_truth)
    found = extract_solution(solution_str, method)
    if found is None:
        return 0.0
    return score if Decimal(found) == truth else format_score


def _number(ground_truth: object) -> Decimal:
    try:
        return Decimal(_plain(str(ground_truth)))
    except InvalidOperation as error:
        raise ValueError(f"ground_truth {ground_truth!r} is not a number. GSM8K answers are; check the row.") from error


def _plain(number: str) -> str:
    return re.sub(r"[,$\s]", "", number)
