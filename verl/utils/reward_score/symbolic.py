"""Symbolic comparison of LaTeX answers by math-verify, with a time limit, on any thread.

math-verify limits its time with an alarm, which only the main thread of a process can have. On the main thread, where
scorer processes work, our timer counts CPU time: the result does not depend on the load of the machine or on whether
the process was stopped. On other threads a pool of one process compares.
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
_MAX_CHARACTERS = 300
_MAX_DEPTH = 10
_RELATIVE = 1e-5
_MAX_EXPONENT = 10_000
_MAX_FACTORIAL = 5_000
_TOWER = re.compile(r"\^\s*(?:\{[^{}]*\^|\d+\s*\^)|\}\s*\^[^{}]*\}\s*\^")
_EXPONENT = re.compile(r"\^\s*\{?\s*[-+]?\s*(\d+)|\d[eE][-+]?(\d+)")
_FACTORIAL = re.compile(r"(\d+|[)}\]!])\s*!")


def symbolically_equal(truth: str, answer: str) -> bool:
    """Whether the answer equals the truth symbolically; False if that cannot be decided in time."""
    if len(answer) > max(_MAX_CHARACTERS, 3 * len(truth)) or not _is_readable(answer) or _explodes(answer):
        return False
    if threading.current_thread() is threading.main_thread():
        return _compare_in_time(truth, answer)
    try:
        return _helper(os.getpid()).submit(_compare_in_time, truth, answer, timeout=_HELPER_SECONDS).result()
    except (TaskTimeout, ProcessDied):
        return False


class _OutOfTimeError(BaseException):
    """Not an Exception, so that no library handles it as a failed attempt and continues."""


def _compare_in_time(truth: str, answer: str) -> bool:
    verify = _math_verify().verify

    def on_timer(number: int, frame: Any) -> None:
        raise _OutOfTimeError

    before = signal.signal(signal.SIGVTALRM, on_timer)
    # It repeats: an exception that is raised in a finalizer is lost.
    timer = signal.setitimer(signal.ITIMER_VIRTUAL, _CPU_SECONDS, _CPU_SECONDS / 10)
    try:
        ours, theirs = _parsed(answer), _parsed(truth)
        return bool(verify(list(theirs), list(ours), timeout_seconds=None)) and not _far_apart(theirs, ours)
    except (_OutOfTimeError, RecursionError):
        return False
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, *timer)
        signal.signal(signal.SIGVTALRM, before)


@functools.lru_cache(maxsize=256)  # one truth is compared with many answers
def _parsed(latex: str) -> tuple[Any, ...]:
    package = _math_verify()
    # Only LaTeX: for plain expressions math-verify would evaluate the text as Python.
    target = package.LatexExtractionConfig(boxed_match_priority=0)
    # Only the whole box: otherwise math-verify extracts fractions from a text that it cannot parse.
    return tuple(package.parse(f"\\boxed{{{latex}}}", [target], extraction_mode="first_match", parsing_timeout=None))


def _far_apart(truth: tuple[Any, ...], answer: tuple[Any, ...]) -> bool:
    """Whether two numbers differ in their first digits; math-verify compares six decimals, all zero for `2^{-98}`."""
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
    # Suppress its warning that it has no time limit.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return package


def _is_readable(latex: str) -> bool:
    """Whether brackets of any kind (`[0, 1)`) match and are not nested deeply: the parser takes seconds otherwise."""
    depth = deepest = 0
    for character in latex:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, abs(depth))
    return depth == 0 and deepest <= _MAX_DEPTH


def _explodes(latex: str) -> bool:
    """Whether its value may be an enormous number; no alarm interrupts such arithmetic."""
    text = latex.replace("\\!", "")
    if _TOWER.search(text):
        return True
    exponents = [_whole(one or other) for one, other in _EXPONENT.findall(text)]
    product = functools.reduce(lambda a, b: min(a * max(b, 1), 10**9), exponents, 1)
    factorials = [_whole(number) if number.isdigit() else _MAX_FACTORIAL + 1 for number in _FACTORIAL.findall(text)]
    nested = ")^" in text or "}^" in text  # powers of powers multiply their exponents
    return (
        max(exponents, default=0) > _MAX_EXPONENT
        or (nested and product > _MAX_EXPONENT**2)
        or max(factorials, default=0) > _MAX_FACTORIAL
    )


def _whole(digits: str) -> int:
    return int(digits) if len(digits) < 10 else 10**9


@functools.lru_cache(maxsize=1)
def _helper(owner: int) -> ProcessPool:
    """The process that compares for threads without an alarm; one per process (`owner`), started on first use."""
    _math_verify()  # raise here if it is not installed
    return ProcessPool(1, initializer=_math_verify)
