"""Exact numbers in answers: the value of an arithmetic expression, and the one number that a short text states.

Nothing that a model writes is evaluated as code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

from verl.utils.reward_score.normalize import (
    COMMAND,
    FONT_COMMANDS,
    LAYOUT_COMMANDS,
    MATH_DELIMITERS,
    NOT_A_UNIT,
    SCALES,
    SPACE_COMMANDS,
    UNIT_ABBREVIATIONS,
    replace_commands,
    strip_layout,
    unicode_to_latex,
)

_TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+|[-+*/()\[\]{}])", re.ASCII)
_FRACTION = re.compile(r"\\[dtc]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}|\{([^{}]*)\\over([^{}]*)\}")
_LETTER_TIMES = re.compile(r"(?<=[\d)\]])\s*[xX]\s*(?=[\d(\[])")
_COLON = re.compile(r"(?<=[\d)\]])\s*:\s*(?=[\d(\[])")
_OPERATOR_COMMANDS = {
    **dict.fromkeys((*LAYOUT_COMMANDS, *SPACE_COMMANDS, "\\,"), ""),
    **dict.fromkeys(("\\times", "\\cdot"), "*"),
    "\\div": "/",
}
_PRECEDENCE = {"(": 0, "+": 1, "-": 1, "*": 2, "/": 2, "negative": 3}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_MAX_TOKENS = 1000
_MAX_DIGITS = 18


def tokenize(text: str) -> list[str] | None:
    """Split an expression into numbers, operators and round brackets; None if it contains anything else, is too long,
    or has brackets that do not match.

    `\\frac{a}{b}` becomes a division, `2(3+4)` a product, and all brackets become round ones.
    """
    if "\\" in text:
        text = _FRACTION.sub(r"((\1\3)/(\2\4))", text)
        text = COMMAND.sub(lambda match: _OPERATOR_COMMANDS.get(match.group(), "?"), text)
    text = _COLON.sub("/", _LETTER_TIMES.sub("*", text)).replace("&", "").strip()
    tokens: list[str] = []
    open_brackets: list[str] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or len(tokens) >= _MAX_TOKENS or len(match.group(1)) > _MAX_DIGITS:
            return None
        token, position = match.group(1), match.end()
        if token in _CLOSING:
            open_brackets.append(_CLOSING[token])
            token = "("
        elif token in _CLOSING.values():
            if not open_brackets or open_brackets.pop() != token:
                return None
            token = ")"
        previous = tokens[-1] if tokens else "+"
        if (token == "(" and (is_number(previous) or previous == ")")) or (is_number(token) and previous == ")"):
            tokens.append("*")
        tokens.append(token)
    return tokens if tokens and not open_brackets else None


def evaluate(tokens: Sequence[str]) -> Fraction | None:
    """The exact value of an expression; None if the tokens are not a valid expression, or it divides by zero."""
    values: list[Fraction | int] = []
    operators: list[str] = []  # not applied yet, and open brackets
    after_value = False
    try:
        for token in tokens:
            if after_value and token == ")":
                _apply(operators, values, 1)
                operators.pop()
            elif after_value and token in _PRECEDENCE and token != "(":
                _apply(operators, values, _PRECEDENCE[token])
                operators.append(token)
                after_value = False
            elif after_value:
                return None
            elif is_number(token):
                values.append(to_number(token))
                after_value = True
            elif token in "(-":
                operators.append("(" if token == "(" else "negative")
            elif token != "+" or (operators and operators[-1] != "("):  # a sign only at the start
                return None
        _apply(operators, values, 1)
    except (IndexError, ZeroDivisionError):
        return None
    return Fraction(values[0]) if after_value and not operators and len(values) == 1 else None


def to_number(token: str) -> Fraction | int:
    """The value of a number token; int where possible, which is faster."""
    return int(token) if token.isdigit() else Fraction(token)


def is_number(token: str) -> bool:
    """Whether a token is a number, not an operator or a bracket."""
    return token[-1].isdigit()


def _apply(operators: list[str], values: list[Fraction | int], precedence: int) -> None:
    """Apply the pending operators of at least this precedence."""
    while operators and _PRECEDENCE[operators[-1]] >= precedence:
        operator, right = operators.pop(), values.pop()
        if operator == "negative":
            values.append(-right)
            continue
        left = values.pop()
        if operator == "/":
            values.append(Fraction(left, right))
        else:
            values.append(left + right if operator == "+" else left - right if operator == "-" else left * right)


# -- the number that a text states -----------------------------------------------------------------------------------

_MAX_STATED_CHARACTERS = 500
_ONES = r"one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen"
_NUMBER_WORD = re.compile(rf"\b(?:{_ONES}|(?:twen|thir|for|fif|six|seven|eigh|nine)ty)\b", re.IGNORECASE)

_DIGITS = r"(?:\d{1,3}(?:(?:,|\\,|')\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_PLAIN_NUMBER = re.compile(rf"\s*((?:-\s?\$?|\$\s?-?)?{_DIGITS})\.?\s*", re.ASCII)
_TEXT_COMMANDS = {
    **dict.fromkeys(("\\times", "\\cdot"), "*"),
    **dict.fromkeys(("\\approx", "\\equiv", "\\simeq"), "="),
    **dict.fromkeys(("\\circ", "\\degree"), "%"),  # ignored, like a percent sign
    **dict.fromkeys(("\\%", "\\#"), ""),
    "\\$": "$",
    **dict.fromkeys(LAYOUT_COMMANDS, ""),
    **dict.fromkeys((*SPACE_COMMANDS, *MATH_DELIMITERS, *FONT_COMMANDS, "\\boxed", "\\fbox", "\\text"), " "),
    "\\angle": "angle ",
    "\\div": "/",
}
_SPACE = re.compile(r"(?<!\d)\\,|\\,(?!\d)")
_SIGNS = re.compile(r"(?:\b[A-Z]{1,3})?\$|[£€¥₹¢&]|\*\*")
_CURRENCY_BEFORE = re.compile(r"^(?:USD|EUR|GBP|Rs\.?)\s*(?=[-\d.])")
_UNIT_EXPONENT = re.compile(r"(?<=[A-Za-z\s])\^\s*\{?\s*[23]\s*\}?")
_PARENTHESIS = re.compile(r"\([^()]*\)")
_VALUE = re.compile(
    rf"(?P<lead>[A-Za-z][A-Za-z ,'-]*?(?:\b(?:is|are|was|were|equals)\b|:)\s*:?|:)?\s*"
    rf"(?P<sign>[-+]\s?|minus\s+)?(?P<digits>{_DIGITS})(?P<exponent>[eE][-+]?\d+)?"
    rf"(?P<power>\s*\*\s*10\s*\^\s*\{{?\s*[-+]?\d+\s*\}}?)?(?:\s*(?P<scale>{'|'.join(SCALES)})\b)?(?P<tail>.*)",
    re.ASCII | re.DOTALL,
)
# A unit, or prose; not `x`, which may be a variable.
_SPACED = rf"(?:[A-Za-z]{{3}}|[A-Za-z]{{1,2}}\s[A-Za-z]{{2}}|[mgshlL]\b|{UNIT_ABBREVIATIONS}\b|[^\x00-\x7f]|\()"
_TAIL = re.compile(
    rf"%?\s*(?:$|[.,;:]?\s+{_SPACED}|[.,;]|{UNIT_ABBREVIATIONS}\b|[^\x00-\x7f]|/\s*(?:[a-z]{{2}}|[hsmgl]\b)|-\s?[a-z]{{3}}|\()"
)
_ANOTHER = re.compile(r"\d|[=<>^_*+!\\{}|~]|\s[-/]\s|\bmod\b")
_RATE = re.compile(r"\b(?:in|per|for|from|after|at|during|within|every)\s+(?:\$?\d[\d,.]*|one)")
_SUBSCRIPT = re.compile(r"_\{?\w+\}?|\^\{?\d\}?|\([^()]*\)")
_SUM = re.compile(r"\d*[A-Za-z]+(?:[-+]\d*[A-Za-z]+)+")


def stated_number(text: str) -> str | None:
    """The one number that a short text states, as plain digits with sign and point; None if there is not exactly one.

    `72`, `**$1,234.50**`, `x = 72 km`, `The sum is 1.5 million.` A number that is only a part of the statement is none:
    one of several (`72 or 73`), one in an expression (`72 × 2`), a bound (`at least 72`), a time of day (`12 pm`). The
    text before it must be a name or end in `is`, `are`, `:` or `=`; the text after it must be a unit or prose without
    another number, except in a rate or a duration (`72 clips in 2 months`).
    """
    plain = _PLAIN_NUMBER.fullmatch(text)
    if plain is not None:
        return re.sub(r"[,$'\s]|\\,", "", plain.group(1))
    *names, value = _simplified(text[:_MAX_STATED_CHARACTERS]).split("=")
    number = _single_number(value)
    return number if number is not None and all(_equals(name, number) for name in names) else None


def _simplified(text: str) -> str:
    """Remove layout and currency; write operators as signs and `≈` as `=`."""
    text = strip_layout(unicode_to_latex(text)).replace("{,}", ",").replace(",\\!", ",").replace("\n", " ")
    text = replace_commands(text, _TEXT_COMMANDS)
    text = _SPACE.sub(" ", text)
    text = _SIGNS.sub("", text).replace("^{%}", "%").replace("^ %", "%").replace("^%", "%")
    return re.sub(r"(?<![\^_])\{([^{}]*)\}", r" \1 ", text)


def _single_number(value: str) -> str | None:
    text = strip_layout(value)
    if text[:1] + text[-1:] in ("()", "[]", "{}") and "," not in text:
        text = strip_layout(text[1:-1])
    match = _VALUE.fullmatch(_CURRENCY_BEFORE.sub("", text))
    if match is None or not _is_unit(match["tail"]) or NOT_A_UNIT.search(match["lead"] or ""):
        return None
    digits = re.sub(r"[,']|\\,", "", match["digits"])
    sign = "-" if match["sign"] and not match["sign"].startswith("+") else ""
    exponent = int(match["exponent"][1:]) if match["exponent"] else 0
    exponent += int(re.sub(r"[{}\s]", "", match["power"].partition("^")[2])) if match["power"] else 0
    if not exponent and not match["scale"]:
        return sign + digits
    if abs(exponent) > _MAX_STATED_CHARACTERS:
        return None
    return f"{sign}{Decimal(digits).scaleb(exponent) * SCALES.get(match['scale'], 1):f}"


def _is_unit(tail: str) -> bool:
    """Whether the text after a number does not change it."""
    if NOT_A_UNIT.search(tail):
        return False
    tail = _UNIT_EXPONENT.sub("", _RATE.sub("", _PARENTHESIS.sub("", tail)))
    return _TAIL.match(tail) is not None and _ANOTHER.search(tail) is None and _NUMBER_WORD.search(tail) is None


def _equals(name: str, number: str) -> bool:
    """Whether the side of an equation is a name for the number (`m+n`, `100m+n`, `a_1`) or an expression for it."""
    plain = _SUBSCRIPT.sub("", "".join(name.split()))
    if not re.search(r"[\d<>!]", plain) or _SUM.fullmatch(plain):
        return NOT_A_UNIT.search(name) is None
    tokens = tokenize(name)
    return tokens is not None and evaluate(tokens) == Fraction(number)
