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

SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
SCALES |= {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9}
# What makes another number of a number, or takes it back; `12 pm` is a time. Beside them there are units and prose.
NO_UNIT = re.compile(
    r"\b(?:or|nor|not|no|none|never|neither|but|maybe|perhaps|possibly|wrong|incorrect|false|half|quarters?|thirds?|plus|"
    r"minus|squared|cubed|factorial|divided|multiplied|below|modulo|[ap]\.?\s?m)\b|n't\b|[百千万亿億]",
    re.IGNORECASE,
)
_ONES = r"one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen"
_NUMBER_WORD = re.compile(rf"\b(?:{_ONES}|(?:twen|thir|for|fif|six|seven|eigh|nine)ty)\b", re.IGNORECASE)
ABBREVIATIONS = r"(?:mm|cm|dm|km|in|ft|yd|mi|mg|kg|lbs?|oz|ml|mL|cl|hrs?|min|sec|mph|kph|km/h|m/s|USD|EUR|GBP)"

_DIGITS = r"(?:\d{1,3}(?:(?:,|\\,|')\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_PLAIN = re.compile(rf"\s*((?:-\s?\$?|\$\s?-?)?{_DIGITS})\.?\s*", re.ASCII)
_COMMAND = re.compile(r"\\(?:[A-Za-z]+|.)", re.DOTALL)
_SPELLINGS = {
    **dict.fromkeys(("\\times", "\\cdot"), "*"),
    **dict.fromkeys(("\\approx", "\\equiv", "\\simeq"), "="),
    **dict.fromkeys(("\\circ", "\\degree"), "%"),  # as little to the number as a percent sign
    **dict.fromkeys(("\\%", "\\#"), ""),
    "\\$": "$",
    **dict.fromkeys(("\\!", "\\left", "\\right", "\\displaystyle"), ""),
    **dict.fromkeys(("\\;", "\\:", "\\ ", "\\quad", "\\(", "\\)", "\\[", "\\]", "\\boxed", "\\fbox", "\\text"), " "),
    **dict.fromkeys(("\\textbf", "\\textit", "\\textrm", "\\mbox", "\\mathrm", "\\mathbf", "\\mathit"), " "),
    "\\angle": "angle ",
    "\\div": "/",
}
_SPACE = re.compile(r"(?<!\d)\\,|\\,(?!\d)")
_SIGNS = re.compile(r"(?:\b[A-Z]{1,3})?\$|[£€¥₹¢&]|\*\*")
_CURRENCY_BEFORE = re.compile(r"^(?:USD|EUR|GBP|Rs\.?)\s*(?=[-\d.])")
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
_TAIL = re.compile(
    rf"%?\s*(?:$|[.,;:]?\s+{_SPACED}|[.,;]|{ABBREVIATIONS}\b|[^\x00-\x7f]|/\s*(?:[a-z]{{2}}|[hsmgl]\b)|-\s?[a-z]{{3}}|\()"
)
_ANOTHER = re.compile(r"\d|[=<>^_*+!\\{}|~]|\s[-/]\s|\bmod\b")
_NUMBER_OF_A_UNIT = re.compile(r"\b(?:in|per|for|from|after|at|during|within|every)\s+(?:\$?\d[\d,.]*|one)")
_INDEX = re.compile(r"_\{?\w+\}?|\^\{?\d\}?|\([^()]*\)")
_SUM = re.compile(r"\d*[A-Za-z]+(?:[-+]\d*[A-Za-z]+)+")


def stated_number(text: str) -> str | None:
    """The number that a text states, as plain digits with sign and point; None if it states none, or more than one."""
    plain = _PLAIN.fullmatch(text)
    if plain is not None:
        return re.sub(r"[,$'\s]|\\,", "", plain.group(1))
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
    digits = re.sub(r"[,']|\\,", "", found["digits"])
    sign = "-" if found["sign"] and not found["sign"].startswith("+") else ""
    exponent = int(found["exponent"][1:]) if found["exponent"] else 0
    exponent += int(re.sub(r"[{}\s]", "", found["power"].partition("^")[2])) if found["power"] else 0
    if not exponent and not found["scale"]:
        return sign + digits
    if abs(exponent) > MOST_CHARACTERS:
        return None
    return f"{sign}{Decimal(digits).scaleb(exponent) * SCALES.get(found['scale'], 1):f}"


def _is_unit(tail: str) -> bool:
    """Whether what stands behind a number leaves it as it is."""
    if NO_UNIT.search(tail):
        return False
    tail = _RAISED_UNIT.sub("", _NUMBER_OF_A_UNIT.sub("", _ASIDE.sub("", tail)))
    return _TAIL.match(tail) is not None and _ANOTHER.search(tail) is None and _NUMBER_WORD.search(tail) is None


def _leads_to(name: str, number: str) -> bool:
    """Whether the side of an equation is a name for the number (`m+n`, `100m+n`, `a_1`) or arithmetic that makes it."""
    plain = _INDEX.sub("", "".join(name.split()))
    if not re.search(r"[\d<>!]", plain) or _SUM.fullmatch(plain):
        return NO_UNIT.search(name) is None
    tokens = tokens_of(name)
    return tokens is not None and value_of(tokens) == Fraction(number)
