"""Whether two LaTeX answers mean the same, by math-verify, within a time limit, on any thread.

math-verify limits its time with an alarm, which only a process's main thread can have. On the main thread, where scorer
processes work, ours counts processor time: the result depends neither on how busy the machine is nor on whether the
process was stopped for a while. On any other thread a process pool of one compares.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import re
import signal
import threading
from typing import Any

from verl.utils.process_pool import ProcessDied, ProcessPool, TaskTimeout

_CPU_SECONDS = 2.0
_HELPER_SECONDS = 30.0
_MOST_CHARACTERS = 300
_DEEPEST = 10
_RELATIVE = 1e-5
_LARGEST_EXPONENT = 10_000
_LARGEST_FACTORIAL = 5_000
_TOWER = re.compile(r"\^\s*(?:\{[^{}]*\^|\d+\s*\^)|\}\s*\^[^{}]*\}\s*\^")
_EXPONENT = re.compile(r"\^\s*\{?\s*[-+]?\s*(\d+)|\d[eE][-+]?(\d+)")
_FACTORIAL = re.compile(r"(\d+|[)}\]!])\s*!")


def symbolically_equal(truth: str, answer: str) -> bool:
    """Whether the answer equals the right one as mathematics; False where that cannot be found out in time."""
    if len(answer) > max(_MOST_CHARACTERS, 3 * len(truth)) or not _is_readable(answer) or _explodes(answer):
        return False
    if threading.current_thread() is threading.main_thread():
        return _compare_in_time(truth, answer)
    try:
        return _helper(os.getpid()).submit(_compare_in_time, truth, answer, timeout=_HELPER_SECONDS).result()
    except (TaskTimeout, ProcessDied):
        return False


class _OutOfTimeError(BaseException):
    """Not an Exception: nothing on the way may take it for a failed attempt and go on."""


def _compare_in_time(truth: str, answer: str) -> bool:
    verify = _math_verify().verify

    def ring(number: int, frame: Any) -> None:
        raise _OutOfTimeError

    before = signal.signal(signal.SIGVTALRM, ring)
    # It rings again: raised where exceptions are ignored (a finalizer), the first one is lost.
    timer = signal.setitimer(signal.ITIMER_VIRTUAL, _CPU_SECONDS, _CPU_SECONDS / 10)
    try:
        ours, theirs = _parsed(answer), _parsed(truth)
        return bool(verify(list(theirs), list(ours), timeout_seconds=None)) and not _far_apart(theirs, ours)
    except (_OutOfTimeError, RecursionError):
        return False
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, *timer)
        signal.signal(signal.SIGVTALRM, before)


@functools.lru_cache(maxsize=256)  # one right answer is compared with many
def _parsed(latex: str) -> tuple[Any, ...]:
    package = _math_verify()
    # Only LaTeX: for plain expressions math-verify would evaluate the text as Python.
    target = package.LatexExtractionConfig(boxed_match_priority=0)
    # The whole box or nothing: it would go on to look for fractions inside a text that it cannot read.
    return tuple(package.parse(f"\\boxed{{{latex}}}", [target], extraction_mode="first_match", parsing_timeout=None))


def _far_apart(truth: tuple[Any, ...], answer: tuple[Any, ...]) -> bool:
    """Whether two numbers differ in their first digits; math-verify looks at six decimals, all zero for `2^{-98}`."""
    if not (truth and answer and all(getattr(one[0], "is_number", False) for one in (truth, answer))):
        return False
    try:
        left, right = complex(answer[0].evalf(15)), complex(truth[0].evalf(15))
    except (TypeError, ValueError, OverflowError):
        return False
    return abs(left - right) > _RELATIVE * abs(right)


def _math_verify() -> Any:
    try:
        package = importlib.import_module("math_verify")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error}: answers are compared as mathematics with it. Run: pip install math-verify", name=error.name
        ) from error
    # It would warn, once per process, that it has no time limit of its own.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return package


def _is_readable(latex: str) -> bool:
    """Whether brackets of any kind (`[0, 1)`) close, and are not deep: the parser takes seconds over others."""
    depth = deepest = 0
    for character in latex:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, abs(depth))
    return depth == 0 and deepest <= _DEEPEST


def _explodes(latex: str) -> bool:
    """Whether its value may be a number that no machine can write down; no alarm interrupts such arithmetic."""
    text = latex.replace("\\!", "")
    if _TOWER.search(text):
        return True
    exponents = [_whole(one or other) for one, other in _EXPONENT.findall(text)]
    product = functools.reduce(lambda a, b: min(a * max(b, 1), 10**9), exponents, 1)
    factorials = [_whole(number) if number.isdigit() else _LARGEST_FACTORIAL + 1 for number in _FACTORIAL.findall(text)]
    nested = ")^" in text or "}^" in text  # powers of powers multiply their exponents
    return (
        max(exponents, default=0) > _LARGEST_EXPONENT
        or (nested and product > _LARGEST_EXPONENT**2)
        or max(factorials, default=0) > _LARGEST_FACTORIAL
    )


def _whole(digits: str) -> int:
    return int(digits) if len(digits) < 10 else 10**9


@functools.lru_cache(maxsize=1)
def _helper(owner: int) -> ProcessPool:
    """A process that compares for threads which cannot have an alarm; one per process (`owner`), when first needed."""
    _math_verify()  # without it the error belongs here
    return ProcessPool(1, initializer=_math_verify)
