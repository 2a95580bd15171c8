"""The one number that a short text states: `72`, `**$1,234.50**`, `x = 72 km`, `The sum is 1.5 million.`

A number that is only a part of what is stated is none: one of several (`72 or 73`), one in an expression (`72 × 2`), a
bound (`at least 72`), a time of day (`12 pm`). What comes before it must be a name or end in `is`, `are`, `:` or `=`;
what comes behind it must be a unit or prose without another number, but for `72 clips in 2 months`.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

from verl.utils.reward_score.arithmetic import tokens_of, value_of
from verl.utils.reward_score.unicode_latex import as_latex
from verl.utils.reward_score.wrappers import unwrapped

MOST_CHARACTERS = 500

SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "k": 3, "K": 3, "M": 6, "B": 9}
# Behind a number they are no units; `12 pm` is a time.
NO_UNIT = re.compile(
    r"\b(?:or|not|nor|but|maybe|perhaps|half|quarters?|thirds?|dozens?|mod|[ap]\.?\s?m)\b|[百千万亿億]", re.IGNORECASE
)
ABBREVIATIONS = r"(?:mm|cm|dm|km|in|ft|yd|mi|mg|kg|lbs?|oz|ml|mL|cl|hrs?|min|sec|mph|kph|km/h|m/s|USD|EUR|GBP)"

_DIGITS = r"(?:\d{1,3}(?:(?:,|\\,)\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_PLAIN = re.compile(rf"\s*((?:-\s?\$?|\$\s?-?)?{_DIGITS})\.?\s*", re.ASCII)
_COMMAND = re.compile(r"\\(?:[A-Za-z]+|.)", re.DOTALL)
_SPELLINGS = {
    **dict.fromkeys(("\\times", "\\cdot"), "*"),
    **dict.fromkeys(("\\approx", "\\equiv", "\\simeq"), "="),
    **dict.fromkeys(("\\circ", "\\degree"), "%"),  # as little to the number as a percent sign
    **dict.fromkeys(("\\$", "\\%", "\\#"), ""),
    **dict.fromkeys(("\\!", "\\left", "\\right", "\\displaystyle"), ""),
    **dict.fromkeys(("\\;", "\\:", "\\ ", "\\quad", "\\(", "\\)", "\\[", "\\]", "\\boxed", "\\fbox", "\\text"), " "),
    **dict.fromkeys(("\\textbf", "\\textit", "\\textrm", "\\mbox", "\\mathrm", "\\mathbf", "\\mathit"), " "),
    "\\angle": "angle ",
    "\\div": "/",
}
_SPACE = re.compile(r"(?<!\d)\\,|\\,(?!\d)")
_SIGNS = re.compile(r"[$£€¥₹¢]|\*\*")
_CURRENCY_BEFORE = re.compile(r"^(?:US|USD|EUR|GBP|Rs\.?)\s*(?=[-\d.])")
_RAISED_UNIT = re.compile(r"(?<=[A-Za-z\s])\^\s*\{?\s*[23]\s*\}?")
_ASIDE = re.compile(r"\([^()]*\)")
_VALUE = re.compile(
    rf"(?P<lead>[A-Za-z][A-Za-z ,'-]*?(?:\b(?:is|are|was|were|equals)\b|:)\s*:?|:)?\s*"
    rf"(?P<sign>[-+]\s?|minus\s+)?(?P<digits>{_DIGITS})(?P<exponent>[eE][-+]?\d+)?"
    rf"(?P<power>\s*\*\s*10\s*\^\s*\{{?\s*[-+]?\d+\s*\}}?)?(?:\s*(?P<scale>{'|'.join(SCALES)})\b)?(?P<tail>.*)",
    re.ASCII | re.DOTALL,
)
# A unit, or prose; not `x`, which may be a variable.
_SPACED = rf"(?:[A-Za-z]{{3}}|[A-Za-z]{{1,2}}\s[A-Za-z]{{2}}|[mgshlL]\b|{ABBREVIATIONS}\b|[^\x00-\x7f]|\()"
_TAIL = re.compile(rf"%?\s*(?:$|[.,;:]?\s+{_SPACED}|[.,;]|{ABBREVIATIONS}\b|[^\x00-\x7f]|/\s*[a-z]|-\s?[a-z]{{3}}|\()")
_NUMBER_OF_A_UNIT = re.compile(r"\b(?:in|per|for|of|from|by|after|at|during|within|every)\s+\$?\d[\d,.]*")
_NAME = r"\|?\\?[A-Za-z]+\|?(?:_\{?\w+\}?)?(?:\([^()]*\))?"
_TERM = rf"\d*{_NAME}(?:\^\{{?\d+\}}?)?"
_NAMED = re.compile(rf"(?:{_NAME}|{_TERM}(?:[-+]{_TERM})+)?", re.ASCII)


def stated_number(text: str) -> str | None:
    """The number that a text states, as plain digits with sign and point; None if it states none, or more than one."""
    plain = _PLAIN.fullmatch(text)
    if plain is not None:
        return re.sub(r"[,$\s]|\\,", "", plain.group(1))
    *names, value = _simplified(text[:MOST_CHARACTERS]).split("=")
    number = _number(value)
    return number if number is not None and all(_leads_to(name, number) for name in names) else None


def _simplified(text: str) -> str:
    """Without layout and currency; names of operators as signs, `≈` as `=`."""
    text = unwrapped(as_latex(text)).replace("{,}", ",").replace(",\\!", ",").replace("\n", " ")
    text = _COMMAND.sub(lambda found: _SPELLINGS.get(found.group(), found.group()), text)
    text = _SPACE.sub(" ", text)
    text = _SIGNS.sub("", text).replace("^{%}", "%").replace("^ %", "%").replace("^%", "%")
    return re.sub(r"(?<![\^_])\{([^{}]*)\}", r" \1 ", text)


def _number(value: str) -> str | None:
    text = unwrapped(value)
    if text[:1] + text[-1:] in ("()", "[]", "{}") and "," not in text:
        text = unwrapped(text[1:-1])
    found = _VALUE.fullmatch(_CURRENCY_BEFORE.sub("", text))
    if found is None or not _is_unit(found["tail"]) or NO_UNIT.search(found["lead"] or ""):
        return None
    digits = re.sub(r",|\\,", "", found["digits"])
    sign = "-" if found["sign"] and not found["sign"].startswith("+") else ""
    exponent = int(found["exponent"][1:]) if found["exponent"] else 0
    exponent += int(re.sub(r"[{}\s]", "", found["power"].partition("^")[2])) if found["power"] else 0
    exponent += SCALES[found["scale"]] if found["scale"] else 0
    if not exponent:
        return sign + digits
    return f"{sign}{Decimal(digits).scaleb(exponent):f}" if abs(exponent) < MOST_CHARACTERS else None


def _is_unit(tail: str) -> bool:
    """Whether what stands behind a number leaves it as it is."""
    if NO_UNIT.search(tail):
        return False
    tail = _RAISED_UNIT.sub("", _NUMBER_OF_A_UNIT.sub("", _ASIDE.sub("", tail)))
    return _TAIL.match(tail) is not None and re.search(r"\d|[=<>^_*+!\\{}|~]|\s[-/]\s", tail) is None


def _leads_to(name: str, number: str) -> bool:
    """Whether the side of an equation is a name for the number, a sum of names, or arithmetic that makes it."""
    if _NAMED.fullmatch("".join(name.split())):
        return NO_UNIT.search(name) is None
    tokens = tokens_of(name)
    return tokens is not None and value_of(tokens) == Fraction(number)
