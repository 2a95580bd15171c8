"""MATH: the answer stands in the last `\\boxed{…}` (Hendrycks et al., arXiv 2103.03874) and is compared as mathematics.

Most answers are decided as text or as plain numbers, in microseconds; math-verify is asked about the others only.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from verl.utils.reward_score.equation import sides, states
from verl.utils.reward_score.latex_answer import as_number, cleaned, has_words, in_base, normalised
from verl.utils.reward_score.marked import last_boxed, last_boxed_only_string, remove_boxed
from verl.utils.reward_score.quantity import stated_number
from verl.utils.reward_score.registry import register_score
from verl.utils.reward_score.symbolic import symbolically_equal

__all__ = ["compute_score", "extract_solution", "is_equiv", "last_boxed_only_string", "remove_boxed"]

# Numbers that agree to five digits are left to math-verify: 0.333333 may mean 1/3.
_CLEARLY_APART = 1e-5


def extract_solution(solution_str: str) -> str | None:
    """What stands in the last box; None without one."""
    return last_boxed(solution_str)


def answer_of(ground_truth: object) -> str:
    """A right answer in the right format."""
    return f"\\boxed{{{_truth(ground_truth)}}}"


@register_score(
    "lighteval/MATH",
    "lighteval/MATH-*",
    "DigitalLearningGmbH/MATH-lighteval",
    "HuggingFaceH4/MATH-500",
    "hendrycks/competition_math",
    "EleutherAI/hendrycks_math",
    "hiyouga/math12k",
    "agentica-org/DeepScaleR-Preview-Dataset",
    "open-r1/OpenR1-Math-220k",
    "AI-MO/NuminaMath-*",
    "math",
    "MATH",
    "math500",
    "math_500",
    "MATH-500",
    "numina_*",
    answer=answer_of,
    extract=extract_solution,
)
def compute_score(solution_str: str, ground_truth: Any, format_score: float = 0.0, score: float = 1.0) -> float:
    """`score` for a right answer in a box, `format_score` for a wrong one in a box, 0 without a box."""
    answer = extract_solution(solution_str)
    if answer is None:
        return 0.0
    return score if is_equiv(answer, _truth(ground_truth)) else format_score


def is_equiv(answer: str, truth: str) -> bool:
    """Whether two LaTeX answers are equal: in one spelling, as numbers, or else as mathematics."""
    ours, theirs = normalised(answer), normalised(truth)
    if ours == theirs:
        return True
    if not ours:
        return False
    if "=" in truth and all(as_number(normalised(value)) is not None for value in truth.split("=")):
        return all(any(is_equiv(side, value) for value in truth.split("=")) for side in answer.split("="))
    if in_base(ours) or in_base(theirs):
        return _same_digits(ours, theirs)
    if sides(ours)[1] and not sides(theirs)[1]:
        if states(ours, theirs, is_equiv):
            return True
        if "=" not in truth:  # no equation, nor a value with a name
            return False
    left, right = as_number(ours), as_number(theirs)
    if left is None and right is not None and "=" not in ours and (stated := stated_number(answer)) is not None:
        left = Fraction(stated)
    if left is not None and right is not None:
        if left == right or ("%" in truth and 100 * left == right) or ("%" in answer and left == 100 * right):
            return True
        if abs(left - right) > _CLEARLY_APART * abs(right):
            return False
    ours, theirs = cleaned(answer), cleaned(truth)
    return not has_words(ours) and not has_words(theirs) and symbolically_equal(theirs, ours)


def _same_digits(ours: str, theirs: str) -> bool:
    """Numbers in a base, which math-verify does not look at; it may be left out where the question gives it."""
    left, right = in_base(ours), in_base(theirs)
    return left == right if left and right else (left[0] if left else ours) == (right[0] if right else theirs)


def _truth(ground_truth: object) -> str:
    text = str(ground_truth).strip()
    if ground_truth is None or not text:
        raise ValueError(f"ground_truth {ground_truth!r} is empty. Write the right answer, or remove the row.")
    return last_boxed(text) or text
