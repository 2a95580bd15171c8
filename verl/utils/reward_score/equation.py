"""Answers with a sign of relation between their sides: `x = 2 + 3 = 5` states 5, `4 = 5` and `2x = 5` do not."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from verl.utils.reward_score.latex_answer import NAME, as_number

_SIGN = re.compile(r"\\(?:approx|neq|leq|geq|equiv)(?![a-z])|[=<>]")
_BRACKET = re.compile(r"\\.|[{}]")
_NAME = re.compile(NAME)
_NEAR = Fraction(1, 100)
# Each may take the time of a comparison.
_MOST_SIDES = 5


def sides(normal: str) -> tuple[list[str], list[str]]:
    """The sides of a normalised answer and the signs between them; those in braces (`\\sum_{k=1}`) divide nothing."""
    found, signs, start, depth = [], [], 0, 0
    for token in re.finditer(rf"{_SIGN.pattern}|{_BRACKET.pattern}", normal):
        if token.group() in ("{", "}"):
            depth += 1 if token.group() == "{" else -1
        elif depth == 0 and _SIGN.fullmatch(token.group()):
            found.append(normal[start : token.start()])
            signs.append(token.group())
            start = token.end()
    return [*found, normal[start:]], signs


def states(normal: str, truth: str, equal: Callable[[str, str], bool]) -> bool:
    """Whether an equation says that something has this value: one side names it, all others must have it.

    Beside `\\approx` a number that is near, or any number for a value that is none, will do, but not for all sides.
    """
    values, signs = sides(normal)
    if not set(signs) <= {"=", "\\approx", "\\equiv"}:
        return False
    if not values[0] or _NAME.fullmatch(values[0]):
        values = values[1:]
    elif _NAME.fullmatch(values[-1]):
        values = values[:-1]
    if len(values) > _MOST_SIDES:
        return False
    if "\\approx" not in signs:
        return all(equal(value, truth) for value in values)
    others = [value for value in values if not _is_near(value, truth)]
    return all(equal(value, truth) for value in others) if others else any(equal(value, truth) for value in values)


def _is_near(value: str, truth: str) -> bool:
    left, right = as_number(value), as_number(truth)
    return left is not None and (right is None or abs(left - right) <= _NEAR * abs(right))
