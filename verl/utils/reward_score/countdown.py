"""Countdown: an equation in `<answer>` tags that uses each given number once and whose value is the target.

Nothing that the model writes is evaluated as code: `arithmetic` parses numbers, + - * / and brackets and computes with
exact fractions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from fractions import Fraction
from itertools import combinations
from typing import Any

from verl.utils.reward_score.arithmetic import evaluate, is_number, to_number, tokenize
from verl.utils.reward_score.extraction import last_tagged
from verl.utils.reward_score.normalize import strip_layout, unicode_to_latex
from verl.utils.reward_score.registry import register_score

__all__ = ["answer_of", "compute_score", "extract_solution", "puzzle"]

_EQUALS = re.compile(r"=+")
_MAX_SIDES = 10
# The value of an expression, and the expression as text.
_Term = tuple[Fraction | int, str]
# Trying all ways to combine five numbers takes seconds, six numbers take minutes.
_MAX_NUMBERS_SOLVED = 5


def extract_solution(solution_str: str) -> str | None:
    """The content of the last `<answer>…</answer>`; None without one."""
    return last_tagged(solution_str, "answer")


def answer_of(ground_truth: Any) -> str | None:
    """A solution of the puzzle in the expected format; None if there are too many numbers to search for one.

    ValueError: there is no solution.
    """
    target, numbers = puzzle(ground_truth)
    if len(numbers) > _MAX_NUMBERS_SOLVED:
        return None
    terms: list[_Term] = [(number, str(number)) for number in numbers]
    solution = _solution(terms, target, _integer_results) or _solution(terms, target, _all_results)
    if solution is None:
        raise ValueError(f"no equation with {numbers} makes {target}. Remove the row.")
    return f"<answer>{solution}</answer>"


@register_score("countdown", "countdown_*", "Jiayi-Pan/Countdown-Tasks-*", answer=answer_of, extract=extract_solution)
def compute_score(solution_str: str, ground_truth: Any, format_score: float = 0.0, score: float = 1.0) -> float:
    """`score` for an equation that solves the puzzle, `format_score` for anything else in the tags, 0 without them.

    `ground_truth` is `{"target": 98, "numbers": [44, 19, 35]}` (or `nums`). The answer may consist of several
    sides (`44 + 19 + 35 = 63 + 35 = 98`): every side must equal the target, and one must use exactly the numbers. A
    one-letter name as the first side is ignored.
    """
    target, numbers = puzzle(ground_truth)
    answer = extract_solution(solution_str)
    if answer is None:
        return 0.0
    sides = [tokenize(side) for side in _sides(answer)]
    used = [Counter(to_number(token) for token in side or () if is_number(token)) for side in sides]
    correct = (
        len(sides) <= _MAX_SIDES
        and Counter(numbers) in used  # first: it bounds the size of the numbers that are evaluated
        and all(side is not None and evaluate(side) == target for side in sides)
    )
    return score if correct else format_score


def puzzle(ground_truth: Any) -> tuple[int, list[int]]:
    """Target and numbers of a ground truth."""
    fields = ground_truth if isinstance(ground_truth, Mapping) else {}
    numbers = fields.get("numbers", fields.get("nums"))
    if fields.get("target") is None or numbers is None or not len(numbers):
        raise ValueError(f"ground_truth {str(ground_truth)[:80]!r}: write {{'target': 98, 'numbers': [44, 19, 35]}}.")
    return int(fields["target"]), [int(number) for number in numbers]


def _sides(answer: str) -> list[str]:
    """The sides of the answer's equation, without layout and without a leading name."""
    text = strip_layout(unicode_to_latex(answer))
    name, equals, rest = text.partition("=")
    if equals and len(name.strip()) <= 1 and not name.strip().isdigit():
        text = rest
    return [strip_layout(side) for side in _EQUALS.split(text)]


def _solution(terms: list[_Term], target: int, results: Callable[[_Term, _Term], list[_Term]]) -> str | None:
    """Depth-first search: combine two terms in every way, then the remaining ones."""
    if len(terms) == 1:
        return terms[0][1] if terms[0][0] == target else None
    for i, j in combinations(range(len(terms)), 2):
        rest = [term for k, term in enumerate(terms) if k not in (i, j)]
        for result in results(terms[i], terms[j]):
            if (solution := _solution([*rest, result], target, results)) is not None:
                return solution
    return None


def _integer_results(one: _Term, other: _Term) -> list[_Term]:
    """The non-negative integers that two terms can be combined to: enough for most puzzles, and fast."""
    (b, right), (a, left) = sorted((one, other), key=lambda term: term[0])
    results = [(a + b, f"({left} + {right})"), (a * b, f"({left} * {right})"), (a - b, f"({left} - {right})")]
    return [*results, (a // b, f"({left} / {right})")] if b and a % b == 0 else results


def _all_results(one: _Term, other: _Term) -> list[_Term]:
    """All numbers that two terms can be combined to, including fractions and negative numbers."""
    (a, left), (b, right) = one, other
    results = [(a + b, f"({left} + {right})"), (a * b, f"({left} * {right})")]
    results += [(a - b, f"({left} - {right})"), (b - a, f"({right} - {left})")]
    results += [(Fraction(a) / b, f"({left} / {right})")] if b else []
    return [*results, (Fraction(b) / a, f"({right} / {left})")] if a else results
