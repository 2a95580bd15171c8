"""Sums, products and quotients of numbers, read exactly. Nothing a model writes is evaluated as code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

_TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+|[-+*/()\[\]{}])", re.ASCII)
_FRACTION = re.compile(r"\\[dtc]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}|\{([^{}]*)\\over([^{}]*)\}")
_LETTER_TIMES = re.compile(r"(?<=[\d)\]])\s*[xX]\s*(?=[\d(\[])")
_COLON = re.compile(r"(?<=[\d)\]])\s*:\s*(?=[\d(\[])")
_COMMAND = re.compile(r"\\(?:[A-Za-z]+|.)", re.DOTALL)
_SPELLINGS = {"\\times": "*", "\\cdot": "*", "\\div": "/"}
_LAYOUT = {f"\\{name}" for name in ("left", "right", "bigl", "bigr", "big", "Big", "displaystyle", "quad", *",;:! ")}
_STRENGTH = {"(": 0, "+": 1, "-": 1, "*": 2, "/": 2, "negative": 3}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_MOST_TOKENS = 1000
_MOST_DIGITS = 18


def tokens_of(text: str) -> list[str] | None:
    """Numbers, operators and round brackets in order; None where there is anything else, or brackets do not match.

    `\\frac{a}{b}`, `2(3+4)` and other kinds of brackets are written out.
    """
    if "\\" in text:
        text = _FRACTION.sub(r"((\1\3)/(\2\4))", text)
        text = _COMMAND.sub(lambda found: "" if found.group() in _LAYOUT else _SPELLINGS.get(found.group(), "?"), text)
    text = _COLON.sub("/", _LETTER_TIMES.sub("*", text)).replace("&", "").strip()
    tokens: list[str] = []
    open_brackets: list[str] = []
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None or len(tokens) >= _MOST_TOKENS or len(found.group(1)) > _MOST_DIGITS:
            return None
        token, position = found.group(1), found.end()
        if token in _CLOSING:
            open_brackets.append(_CLOSING[token])
            token = "("
        elif token in _CLOSING.values():
            if not open_brackets or open_brackets.pop() != token:
                return None
            token = ")"
        before = tokens[-1] if tokens else "+"
        if (token == "(" and (is_number(before) or before == ")")) or (is_number(token) and before == ")"):
            tokens.append("*")
        tokens.append(token)
    return tokens if tokens and not open_brackets else None


def value_of(tokens: Sequence[str]) -> Fraction | None:
    """The value of an expression, exactly; None if it is none, or divides by zero."""
    values: list[Fraction | int] = []
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
            elif is_number(token):
                values.append(number(token))
                after_value = True
            elif token in "(-":
                waiting.append("(" if token == "(" else "negative")
            elif token != "+" or (waiting and waiting[-1] != "("):  # a plus sign, only where an expression begins
                return None
        _apply(waiting, values, 1)
    except (IndexError, ZeroDivisionError):
        return None
    return Fraction(values[0]) if after_value and not waiting and len(values) == 1 else None


def number(token: str) -> Fraction | int:
    """The value of a number; integers are faster."""
    return int(token) if token.isdigit() else Fraction(token)


def is_number(token: str) -> bool:
    """Whether a token is a number, not an operator or a bracket."""
    return token[-1].isdigit()


def _apply(waiting: list[str], values: list[Fraction | int], strength: int) -> None:
    """Do the waiting operations that bind at least so strongly."""
    while waiting and _STRENGTH[waiting[-1]] >= strength:
        operator, right = waiting.pop(), values.pop()
        if operator == "negative":
            values.append(-right)
            continue
        left = values.pop()
        if operator == "/":
            values.append(Fraction(left, right))
        else:
            values.append(left + right if operator == "+" else left - right if operator == "-" else left * right)
