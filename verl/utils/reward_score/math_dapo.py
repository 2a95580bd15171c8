"""DAPO-Math and AIME: the last line is `Answer: …`, and the answer a number (DAPO, arXiv 2503.14476).

Scores are 1 and 0, as for all tasks in this package; the paper uses 1 and -1, which changes the advantages of a group
by at most a factor. For the paper's scores, set custom_reward_function.path=pkg://verl.utils.reward_score.math_dapo and
custom_reward_function.reward_kwargs={format_score: -1, no_answer_score: -1}.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from verl.utils.reward_score.arithmetic import stated_number
from verl.utils.reward_score.extraction import last_boxed, last_boxed_only_string, last_match, remove_boxed
from verl.utils.reward_score.normalize import normalize_math, parse_number
from verl.utils.reward_score.registry import register_score

__all__ = ["compute_score", "extract_solution", "last_boxed_only_string", "remove_boxed"]

_ANSWER = re.compile(r"answer[*_ \t]{0,8}[:：]", re.IGNORECASE)
# Lines that only open displayed mathematics or bold text; the answer is on the next line.
_OPENINGS = {"", "$", "$$", "\\[", "\\(", "**", "*"}
_MAX_CHARACTERS = 500


def extract_solution(solution_str: str) -> str | None:
    """The text after the last `Answer:`, on its line or the next non-empty one; else the content of the last box.

    Models that were trained to box their results do so even if the prompt requires another format.
    """
    match = last_match(_ANSWER, solution_str, ["answer"])
    if match is None:
        return last_boxed(solution_str)
    lines = solution_str[match.end() : match.end() + _MAX_CHARACTERS].splitlines()
    line = next((text for text in map(str.strip, lines) if text not in _OPENINGS), None)
    return None if line is None else (last_boxed(line) if line.count("\\boxed") == 1 else None) or line


def answer_of(ground_truth: object) -> str:
    """A correct response in the expected format."""
    return f"Answer: {ground_truth}"


@register_score(
    "math_dapo",
    "math_dapo_*",
    "DAPO-17k",
    "dapo_math*",
    "BytedTsinghua-SIA/DAPO-Math-17k",
    "BytedTsinghua-SIA/AIME-2024",
    "open-r1/DAPO-Math-17k-Processed",
    "aime*",
    "AIME*",
    "math-ai/aime*",
    "HuggingFaceH4/aime_*",
    "Maxwell-Jia/AIME_2024",
    "yentinglin/aime_2025",
    "amc*",
    answer=answer_of,
    extract=extract_solution,
)
def compute_score(
    solution_str: str,
    ground_truth: Any,
    format_score: float = 0.0,
    score: float = 1.0,
    no_answer_score: float = 0.0,
) -> dict[str, Any]:
    """`score` (correct: `score`; wrong: `format_score`; no answer: `no_answer_score`), `acc` 1.0 or 0.0, and `pred`.

    Answers are equal in canonical form or as numbers: `025` is 25, `m+n = 34` is 34. No symbolic comparison: correct
    answers are integers.
    """
    truth = normalize_math(str(ground_truth))
    if not truth:
        raise ValueError(f"ground_truth {ground_truth!r} is empty. Write the correct answer, or remove the row.")
    answer = extract_solution(solution_str)
    if answer is None:
        return {"score": no_answer_score, "acc": 0.0, "pred": None}
    prediction = normalize_math(answer)
    number = parse_number(prediction)
    if number is None and (stated := stated_number(answer)) is not None:
        number = Fraction(stated)
    correct = prediction == truth or (number is not None and number == parse_number(truth))
    return {
        "score": score if correct else format_score,
        "acc": float(correct),
        "pred": prediction if number is None else str(number),
    }
