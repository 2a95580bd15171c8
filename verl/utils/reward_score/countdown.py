"""Countdown: an equation in `<answer>` tags that uses each given number once and makes the target.

Nothing the model writes is evaluated as code: a small reader for numbers, + - * / and brackets, with exact fractions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import combinations
from typing import Any

from verl.utils.reward_score.latex_answer import as_number, normalised
from verl.utils.reward_score.registry import register_score
from verl.utils.reward_score.tags import last_tagged

_TOKEN = re.compile(r"\s*([0-9]+|[-+*/()])")
_MOST_TOKENS = 1000
_MOST_DIGITS = 18
_SPELLINGS = (
    ("\\times", "*"),
    ("\\cdot", "*"),
    ("\\div", "/"),
    ("×", "*"),
    ("·", "*"),
    ("÷", "/"),
    ("−", "-"),
    ("–", "-"),
)
_Term = tuple[Fraction | int, str]
_STRENGTH = {"(": 0, "+": 1, "-": 1, "*": 2, "/": 2, "negative": 3}
# All ways to combine five numbers are tried in seconds, of six in minutes.
_MOST_NUMBERS_SOLVED = 5


def extract_solution(solution_str: str) -> str | None:
    """What stands in the last `<answer>…</answer>`; None without one."""
    return last_tagged(solution_str, "answer")


def answer_of(ground_truth: Any) -> str | None:
    """A solution of the puzzle in the right format; a ValueError where it has none, None where that would take long."""
    target, numbers = puzzle(ground_truth)
    if len(numbers) > _MOST_NUMBERS_SOLVED:
        return None
    terms: list[_Term] = [(number, str(number)) for number in numbers]
    solution = _solution(terms, target, _whole_ways) or _solution(terms, target, _all_ways)
    if solution is None:
        raise ValueError(f"no equation with {numbers} makes {target}. Remove the row.")
    return f"<answer>{solution}</answer>"


@register_score("countdown", "countdown_*", "Jiayi-Pan/Countdown-Tasks-*", answer=answer_of, extract=extract_solution)
def compute_score(solution_str: str, ground_truth: Any, format_score: float = 0.0, score: float = 1.0) -> float:
    """`score` for an equation that solves the puzzle, `format_score` for anything else in the tags, 0 without them.

    `ground_truth` is `{"target": 98, "numbers": [44, 19, 35]}` (or `nums`). The answer may end in `= 98`.
    """
    target, numbers = puzzle(ground_truth)
    answer = extract_solution(solution_str)
    if answer is None:
        return 0.0
    equation, equals, result = answer.partition("=")
    tokens = _tokens(equation)
    used = Counter(int(token) for token in tokens or () if token.isdigit())
    right = (
        tokens is not None
        and used == Counter(numbers)  # first: so few numbers make no large ones
        and value_of(tokens) == target
        and (not equals or as_number(normalised(result)) == target)
    )
    return score if right else format_score


def value_of(tokens: Sequence[str]) -> Fraction | None:
    """The value of an equation, exactly; None if it is none, or divides by zero."""
    values: list[Fraction] = []
    waiting: list[str] = []  # operators and open brackets
    after_value = False
    try:
        for token in tokens:
            if token == ")":
                _apply(waiting, values, 1)
                waiting.pop()
            elif after_value and token in _STRENGTH and token != "(":
                _apply(waiting, values, _STRENGTH[token])
                waiting.append(token)
                after_value = False
            elif after_value:
                return None
            elif token.isdigit():
                values.append(Fraction(int(token)))
                after_value = True
            elif token in "(-":
                waiting.append("(" if token == "(" else "negative")
            else:
                return None
        _apply(waiting, values, 1)
    except (IndexError, ZeroDivisionError):
        return None
    return values[0] if after_value and not waiting and len(values) == 1 else None


def puzzle(ground_truth: Any) -> tuple[int, list[int]]:
    """Target and numbers of a ground truth."""
    given = ground_truth if isinstance(ground_truth, Mapping) else {}
    numbers = given.get("numbers", given.get("nums"))
    if given.get("target") is None or numbers is None or not len(numbers):
        raise ValueError(f"ground_truth {str(ground_truth)[:80]!r}: write {{'target': 98, 'numbers': [44, 19, 35]}}.")
    return int(given["target"]), [int(number) for number in numbers]


def _tokens(equation: str) -> list[str] | None:
    """Numbers, operators and brackets in order; None where there is anything else."""
    for spelling, plain in _SPELLINGS:
        equation = equation.replace(spelling, plain)
    tokens: list[str] = []
    text, position = equation.strip(), 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None or len(tokens) >= _MOST_TOKENS or len(token.group(1)) > _MOST_DIGITS:
            return None
        tokens.append(token.group(1))
        position = token.end()
    return tokens


def _apply(waiting: list[str], values: list[Fraction], strength: int) -> None:
    """Do the waiting operations that bind at least so strongly."""
    while waiting and _STRENGTH[waiting[-1]] >= strength:
        operator, right = waiting.pop(), values.pop()
        if operator == "negative":
            values.append(-right)
            continue
        left = values.pop()
        if operator == "/":
            values.append(left / right)
        else:
            values.append(left + right if operator == "+" else left - right if operator == "-" else left * right)


def _solution(terms: list[_Term], target: int, ways: Callable[[_Term, _Term], list[_Term]]) -> str | None:
    """Combine two terms in every way, then the rest."""
    if len(terms) == 1:
        return terms[0][1] if terms[0][0] == target else None
    for i, j in combinations(range(len(terms)), 2):
        rest = [term for k, term in enumerate(terms) if k not in (i, j)]
        for way in ways(terms[i], terms[j]):
            if (found := _solution([*rest, way], target, ways)) is not None:
                return found
    return None


def _whole_ways(one: _Term, other: _Term) -> list[_Term]:
    """Without fractions and negative numbers: most puzzles can be solved so, and integers are fast."""
    (b, right), (a, left) = sorted((one, other), key=lambda term: term[0])
    found = [(a + b, f"({left} + {right})"), (a * b, f"({left} * {right})"), (a - b, f"({left} - {right})")]
    return [*found, (a // b, f"({left} / {right})")] if b and a % b == 0 else found


def _all_ways(one: _Term, other: _Term) -> list[_Term]:
    (a, left), (b, right) = one, other
    found = [(a + b, f"({left} + {right})"), (a * b, f"({left} * {right})")]
    found += [(a - b, f"({left} - {right})"), (b - a, f"({right} - {left})")]
    found += [(Fraction(a) / b, f"({left} / {right})")] if b else []
    return [*found, (Fraction(b) / a, f"({right} / {left})")] if a else found
