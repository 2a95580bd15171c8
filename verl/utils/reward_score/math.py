"""MATH: the answer is in the last `\\boxed{…}` (Hendrycks et al., arXiv 2103.03874) and is compared as mathematics.

Most answers are decided as text or as numbers, in microseconds; only the others are compared by math-verify.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import re
import signal
import threading
from fractions import Fraction
from typing import Any

from verl.utils.process_pool import ProcessDied, ProcessPool, TaskTimeout
from verl.utils.reward_score.arithmetic import stated_number
from verl.utils.reward_score.extraction import last_boxed, last_boxed_only_string, remove_boxed
from verl.utils.reward_score.normalize import (
    NAME,
    clean_latex,
    contains_words,
    normalize_math,
    parse_in_base,
    parse_number,
)
from verl.utils.reward_score.registry import register_score

__all__ = ["compute_score", "extract_solution", "is_equiv", "last_boxed_only_string", "remove_boxed"]

# Numbers that agree in five digits are compared by math-verify: 0.333333 may mean 1/3.
_CLEARLY_APART = 1e-5
_RELATION = re.compile(r"\\(?:approx|neq|leq|geq|equiv)(?![a-z])|[=<>]")
_BRACE = re.compile(r"\\.|[{}]")
_NAME = re.compile(NAME)
# Maximum relative error of a side after `\approx`.
_APPROXIMATION_TOLERANCE = Fraction(1, 100)
# Each side may need a symbolic comparison.
_MAX_SIDES = 5


def extract_solution(solution_str: str) -> str | None:
    """The content of the last box; None without one."""
    return last_boxed(solution_str)


def answer_of(ground_truth: object) -> str:
    """A correct response in the expected format."""
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
    """`score` for a correct answer in a box, `format_score` for a wrong one in a box, 0 without a box."""
    answer = extract_solution(solution_str)
    if answer is None:
        return 0.0
    return score if is_equiv(answer, _truth(ground_truth)) else format_score


def is_equiv(answer: str, truth: str) -> bool:
    """Whether two LaTeX answers are equal: in canonical form, as numbers, or symbolically."""
    answer_form, truth_form = normalize_math(answer), normalize_math(truth)
    if answer_form == truth_form:
        return True
    if not answer_form:
        return False
    if "=" in truth and all(parse_number(normalize_math(value)) is not None for value in truth.split("=")):
        return all(any(is_equiv(side, value) for value in truth.split("=")) for side in answer.split("="))
    if parse_in_base(answer_form) or parse_in_base(truth_form):
        return _same_digits(answer_form, truth_form)
    if _split_equation(answer_form)[1] and not _split_equation(truth_form)[1]:
        if _equation_states(answer_form, truth_form):
            return True
        if "=" not in truth:  # the truth is neither an equation nor a named value
            return False
    left, right = parse_number(answer_form), parse_number(truth_form)
    if left is None and right is not None and "=" not in answer_form and (stated := stated_number(answer)) is not None:
        left = Fraction(stated)
    if left is not None and right is not None:
        if left == right or ("%" in truth and 100 * left == right) or ("%" in answer and left == 100 * right):
            return True
        if abs(left - right) > _CLEARLY_APART * abs(right):
            return False
    answer_latex, truth_latex = clean_latex(answer), clean_latex(truth)
    if contains_words(answer_latex) or contains_words(truth_latex):
        return False
    return symbolically_equal(truth_latex, answer_latex)


def _same_digits(answer: str, truth: str) -> bool:
    """Compare numbers with a base such as `4343_6` (math-verify ignores the base); one of them may omit the base."""
    left, right = parse_in_base(answer), parse_in_base(truth)
    return left == right if left and right else (left[0] if left else answer) == (right[0] if right else truth)


def _truth(ground_truth: object) -> str:
    text = str(ground_truth).strip()
    if ground_truth is None or not text:
        raise ValueError(f"ground_truth {ground_truth!r} is empty. Write the correct answer, or remove the row.")
    return last_boxed(text) or text


def _split_equation(normalized: str) -> tuple[list[str], list[str]]:
    """The sides of an answer and the relation signs between them; signs in braces (`\\sum_{k=1}`) do not count."""
    sides, signs, start, depth = [], [], 0, 0
    for token in re.finditer(rf"{_RELATION.pattern}|{_BRACE.pattern}", normalized):
        if token.group() in ("{", "}"):
            depth += 1 if token.group() == "{" else -1
        elif depth == 0 and _RELATION.fullmatch(token.group()):
            sides.append(normalized[start : token.start()])
            signs.append(token.group())
            start = token.end()
    return [*sides, normalized[start:]], signs


def _equation_states(normalized: str, truth: str) -> bool:
    """Whether an equation assigns this value: `x = 2 + 3 = 5` states 5, `4 = 5` and `2x = 5` do not.

    One side may be a name; all others must have the value. With `\\approx`, a side may also be a number close to it
    (any number, if `truth` is not a number), but not all sides.
    """
    values, signs = _split_equation(normalized)
    if not set(signs) <= {"=", "\\approx", "\\equiv"}:
        return False
    if not values[0] or _NAME.fullmatch(values[0]):
        values = values[1:]
    elif _NAME.fullmatch(values[-1]):
        values = values[:-1]
    if len(values) > _MAX_SIDES:
        return False
    if "\\approx" not in signs:
        return all(is_equiv(value, truth) for value in values)
    others = [value for value in values if not _is_approximate(value, truth)]
    return (
        all(is_equiv(value, truth) for value in others) if others else any(is_equiv(value, truth) for value in values)
    )


def _is_approximate(value: str, truth: str) -> bool:
    left, right = parse_number(value), parse_number(truth)
    return left is not None and (right is None or abs(left - right) <= _APPROXIMATION_TOLERANCE * abs(right))


# ---------------------------------------------------------------- symbolic comparison


CPU_SECONDS = 2.0
HELPER_SECONDS = 30.0
_MAX_CHARACTERS = 300
_MAX_DEPTH = 10
# Maximum relative difference of numbers that math-verify takes for equal.
_RELATIVE_TOLERANCE = 1e-5
_MAX_EXPONENT = 10_000
_MAX_FACTORIAL = 5_000
_TOWER = re.compile(r"\^\s*(?:\{[^{}]*\^|\d+\s*\^)|\}\s*\^[^{}]*\}\s*\^")
_EXPONENT = re.compile(r"\^\s*\{?\s*[-+]?\s*(\d+)|\d[eE][-+]?(\d+)")
_FACTORIAL = re.compile(r"(\d+|[)}\]!])\s*!")


def symbolically_equal(truth: str, answer: str) -> bool:
    """Whether the answer equals the truth symbolically; False if that cannot be decided in time."""
    if len(answer) > max(_MAX_CHARACTERS, 3 * len(truth)) or not _has_matching_brackets(answer) or _may_be_huge(answer):
        return False
    if threading.current_thread() is threading.main_thread():
        return _compare_in_time(truth, answer)
    try:
        return _helper_process(os.getpid()).submit(_compare_in_time, truth, answer, timeout=HELPER_SECONDS).result()
    except (TaskTimeout, ProcessDied):
        return False


class _OutOfTimeError(BaseException):
    """A BaseException, so that no library catches it as an Exception and continues."""


def _compare_in_time(truth: str, answer: str) -> bool:
    verify = _math_verify().verify

    def on_timer(number: int, frame: Any) -> None:
        raise _OutOfTimeError

    previous_handler = signal.signal(signal.SIGVTALRM, on_timer)
    # The timer repeats, because an exception that is raised in a finalizer is lost.
    previous_timer = signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS, CPU_SECONDS / 10)
    try:
        parsed_answer, parsed_truth = _parse_latex(answer), _parse_latex(truth)
        equal = bool(verify(list(parsed_truth), list(parsed_answer), timeout_seconds=None))
        return equal and not _far_apart(parsed_truth, parsed_answer)
    except (_OutOfTimeError, RecursionError):
        return False
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, *previous_timer)
        signal.signal(signal.SIGVTALRM, previous_handler)


@functools.lru_cache(maxsize=256)  # one truth is compared with many answers
def _parse_latex(latex: str) -> tuple[Any, ...]:
    package = _math_verify()
    # Only LaTeX: for plain expressions math-verify would evaluate the text as Python.
    target = package.LatexExtractionConfig(boxed_match_priority=0)
    # Only the whole box: otherwise math-verify extracts fractions from a text that it cannot parse.
    return tuple(package.parse(f"\\boxed{{{latex}}}", [target], extraction_mode="first_match", parsing_timeout=None))


def _far_apart(truth: tuple[Any, ...], answer: tuple[Any, ...]) -> bool:
    """Whether two numbers differ in their first digits; math-verify compares six decimals, all zero for `2^{-98}`."""
    if not (truth and answer and all(getattr(values[0], "is_number", False) for values in (truth, answer))):
        return False
    try:
        left, right = complex(answer[0].evalf(15)), complex(truth[0].evalf(15))
    except (TypeError, ValueError, OverflowError):
        return False
    return abs(left - right) > _RELATIVE_TOLERANCE * abs(right)


def _math_verify() -> Any:
    try:
        package = importlib.import_module("math_verify")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error}; this package compares mathematical answers. Run: pip install math-verify", name=error.name
        ) from error
    # Suppress its warning that it has no time limit.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return package


def _has_matching_brackets(latex: str) -> bool:
    """Whether as many brackets are opened as closed, of any kind (`[0, 1)`), and they are not nested deeply: otherwise
    the parser takes seconds."""
    depth = deepest = 0
    for character in latex:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, abs(depth))
    return depth == 0 and deepest <= _MAX_DEPTH


def _may_be_huge(latex: str) -> bool:
    """Whether the value of an expression may be enormous; the timer cannot interrupt such arithmetic."""
    text = latex.replace("\\!", "")
    if _TOWER.search(text):
        return True
    exponents = [_bounded_int(one or other) for one, other in _EXPONENT.findall(text)]
    product = functools.reduce(lambda a, b: min(a * max(b, 1), 10**9), exponents, 1)
    factorials = [
        _bounded_int(number) if number.isdigit() else _MAX_FACTORIAL + 1 for number in _FACTORIAL.findall(text)
    ]
    nested = ")^" in text or "}^" in text  # powers of powers multiply their exponents
    return (
        max(exponents, default=0) > _MAX_EXPONENT
        or (nested and product > _MAX_EXPONENT**2)
        or max(factorials, default=0) > _MAX_FACTORIAL
    )


def _bounded_int(digits: str) -> int:
    return int(digits) if len(digits) < 10 else 10**9


@functools.lru_cache(maxsize=1)
def _helper_process(owner: int) -> ProcessPool:
    """The process that compares for other threads: only the main thread of a process can handle the timer's signal.

    There is one for each process (`owner`: its process id), started on first use.
    """
    _math_verify()  # raise here if it is not installed
    return ProcessPool(1, initializer=_math_verify)
