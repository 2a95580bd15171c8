"""Mathematical answers in one spelling, so that equal ones are mostly equal as text, and plain numbers as fractions.

The conventions are those described for Minerva (arXiv 2206.14858, appendix D.1) and used for MATH since: units,
currency, percent signs, degrees and spacing do not matter; `\\dfrac12`, `\\frac{1}{2}` and `1/2` are the same number.
"""

from __future__ import annotations

import re
from fractions import Fraction

# Longer answers are compared letter by letter only.
MOST_CHARACTERS = 2000

_COMMAND = re.compile(r"\\(?:[A-Za-z]+|.)", re.DOTALL)
_SPELLINGS = {
    **dict.fromkeys(("\\!", "\\,", "\\left", "\\right", "\\displaystyle", "\\bigl", "\\bigr", "\\big", "\\Big"), ""),
    **dict.fromkeys(("\\(", "\\)", "\\[", "\\]", "\\$", "\\%"), ""),
    **dict.fromkeys(("\\;", "\\:", "\\ ", "\\quad", "\\qquad"), " "),
    **dict.fromkeys(("\\dfrac", "\\tfrac", "\\cfrac"), "\\frac"),
    **dict.fromkeys(("\\textbf", "\\textit", "\\textrm", "\\textnormal", "\\mbox", "\\hbox"), "\\text"),
    **dict.fromkeys(("\\mathrm", "\\mathbf", "\\mathit", "\\rm", "\\bf"), "\\text"),
    "\\times": "\\cdot",
    "\\ne": "\\neq",
    "\\le": "\\leq",
    "\\ge": "\\geq",
    "\\degree": "\\circ",
}
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
# Text behind a value is a unit: `12 \text{ cm}^2`; the time of day is not.
_TEXT_UNIT = re.compile(r"(?<=[\w})\]])\s*\\text\s*\{(?!\s*[ap]\.?\s?m)[^{}\d]*\}(?:\^\{?\d\}?)?[.\s]*$", re.IGNORECASE)
_UNITS = (
    "degrees?|dollars?|cents?|bucks?|points?|feet|foot|inch(?:es)?|miles?|yards?|acres?|units?|meters?|metres?|percent|"
    "hours?|minutes?|seconds?|days?|weeks?|months?|years?|people|students?|apples?|books?|times|ways|cm|mm|km|kg|mph|"
    "square units?|sq\\.? units?|square (?:feet|inches|miles|meters|cm)|cubic (?:feet|inches|meters|cm)"
)
_WORD_UNIT = re.compile(rf"(?<=[\d}})])\s+(?:{_UNITS})\s*[.]?$", re.IGNORECASE)
_WORDED_LIST = re.compile(r",?\s*\b(?:and|or)\b\s*")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_NAME_BEFORE_VALUE = re.compile(r"^[A-Za-z]{1,2}(?:\([A-Za-z]\))?=(?=[^=]+$)")
_SHORT_FRACTION = re.compile(r"\\frac(\d|\{[^{}]*\})(\d|[a-z]|\{[^{}]*\})")
_SHORT_ROOT = re.compile(r"\\sqrt([\dA-Za-z])")
_IN_BASE = re.compile(r"(-?[0-9A-Z.]+)_\{?(\d+)\}?")
_NUMBER = r"\d+(?:\.\d*)?|\.\d+"
_NUMBER_ALONE = re.compile(rf"([+-]?)(?:({_NUMBER})|(\d*)\\frac\{{(-?\d+)\}}\{{(-?\d+)\}}|(-?\d+)/(-?\d+))")


def normalised(answer: str) -> str:
    """One spelling for an answer; the same for answers that differ in layout, units or notation only."""
    text = " ".join(answer.split())
    if len(text) > MOST_CHARACTERS:
        return text
    text = re.sub(r",\\!\s?", ",", text).replace("{,}", ",")
    text = _COMMAND.sub(lambda found: _SPELLINGS.get(found.group(), found.group()), text)
    text = re.sub(r"^[*\s]+|[*\s]+$|[$%°€£]|\^\{?\\circ\}?|\\circ", "", text).strip().rstrip(".,;")
    text = _WORD_UNIT.sub("", _TEXT_UNIT.sub("", text))
    text = _TEXT.sub(r" \1 ", text)
    text = _WORDED_LIST.sub(",", text).strip().rstrip(".,;")
    if not re.search(r"[(\[]|\\\{", text):  # in `(1,234)` the comma divides two numbers
        text = _THOUSANDS.sub(lambda found: found.group().replace(",", ""), text)
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)  # `3 4` is not `34`
    text = _NAME_BEFORE_VALUE.sub("", text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", _SHORT_FRACTION.sub(_whole_fraction, text))
    text = re.sub(r"^\(?([A-Z])\)?$", r"\1", text)
    return text.lower() if text.isalpha() and len(text) > 1 else text


def as_number(normal: str) -> Fraction | None:
    """The value of a normalised answer that is one number: `-7`, `0.5`, `3/4`, `\\frac{3}{4}`, `1\\frac{3}{4}`."""
    found = _NUMBER_ALONE.fullmatch(normal) if len(normal) <= MOST_CHARACTERS else None
    if found is None:
        return None
    sign, plain, whole, upper, lower, left, right = found.groups()
    if plain is not None:
        value = Fraction(plain)
    elif int(lower or right) == 0:
        return None
    else:
        value = int(whole or 0) + Fraction(int(upper or left), int(lower or right))
    return -value if sign == "-" else value


def in_base(normal: str) -> tuple[str, str] | None:
    """Digits and base of a normalised answer like `4343_6` or `A5_{11}`."""
    found = _IN_BASE.fullmatch(normal)
    return (found.group(1), found.group(2)) if found else None


def _whole_fraction(found: re.Match[str]) -> str:
    upper, lower = (part if part.startswith("{") else f"{{{part}}}" for part in found.groups())
    return f"\\frac{upper}{lower}"
