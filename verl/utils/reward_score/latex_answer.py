"""Mathematical answers in one spelling, so that equal ones are mostly equal as text, and plain numbers as fractions.

The conventions are those described for Minerva (arXiv 2206.14858, appendix D.1) and used for MATH since: units,
currency, percent signs, degrees and spacing do not matter; `\\dfrac12`, `\\frac{1}{2}`, `½` and `1/2` are the same.
"""

from __future__ import annotations

import re
from fractions import Fraction

from verl.utils.reward_score.quantity import ABBREVIATIONS, NO_UNIT, SCALES
from verl.utils.reward_score.unicode_latex import as_latex
from verl.utils.reward_score.wrappers import unwrapped

# Longer answers are compared letter by letter only.
MOST_CHARACTERS = 2000

_LAYOUT = ((",\\! ", ","), (",\\!", ","), ("{,}", ","), ("~", " "), ("\\left.", ""), ("\\right.", ""))
_COMMAND = re.compile(r"\\(?:[A-Za-z]+|.)", re.DOTALL)
_SPELLINGS = {
    **dict.fromkeys(("\\!", "\\,", "\\left", "\\right", "\\displaystyle", "\\bigl", "\\bigr", "\\big", "\\Big"), ""),
    **dict.fromkeys(("\\(", "\\)", "\\[", "\\]", "\\$", "\\%", "\\large", "\\Large", "\\limits"), ""),
    **dict.fromkeys(("\\;", "\\:", "\\ ", "\\quad", "\\qquad"), " "),
    **dict.fromkeys(("\\dfrac", "\\tfrac", "\\cfrac", "\\nicefrac", "\\sfrac"), "\\frac"),
    **dict.fromkeys(("\\textbf", "\\textit", "\\textrm", "\\textnormal", "\\mbox", "\\hbox"), "\\text"),
    **dict.fromkeys(("\\mathrm", "\\mathbf", "\\mathit", "\\rm", "\\bf"), "\\text"),
    "\\times": "\\cdot",
    "\\div": "/",
    "\\ne": "\\neq",
    "\\le": "\\leq",
    "\\ge": "\\geq",
    "\\lt": "<",
    "\\gt": ">",
    "\\lbrace": "\\{",
    "\\rbrace": "\\}",
    "\\degree": "\\circ",
}
_SIGNS = re.compile(r"^[*\s]+|[*\s]+$|[$%€£]|\^\s?\{?\\circ\s?\}?|\\circ")
# What must be in a text, and then its pattern.
_OTHER_NOTATIONS = [
    ("color", re.compile(r"\\(?:text)?color\s*\{\w*\}"), ""),
    ("over", re.compile(r"\{([^{}]*)\\over([^{}A-Za-z][^{}]*)\}"), r"\\frac{\1}{\2}"),
    ("sqrt", re.compile(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    ("sqrt", re.compile(r"\\sqrt\s*(\d+|[A-Za-z])"), r"\\sqrt{\1}"),
    ("**", re.compile(r"(?<=[\w)])\*\*(?=[\w({-])"), "^"),
    ("pi", re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])"), r"\\pi "),
    ("inf", re.compile(r"(?<![\\A-Za-z])inf(?:inity)?(?![A-Za-z])"), r"\\infty "),
    ("text", re.compile(r"\\text\s*\{\s*([\d.,/]+)\s*\}|\\text(?=\s*[^{\s])"), r"\1"),
    ("m", re.compile(r"\b([ap])\.?\s?m\b\.?", re.IGNORECASE), r"\1m"),
]
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_WORDED_LIST = re.compile(r",?\s*(?:\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z{])(?:and|or)(?![A-Za-z}]))\s*")
# Behind a value, text is a unit: `12 \text{ cm}^2`, `12 triangles`.
_TEXT_UNIT = re.compile(r"(?<=[\w})\]])\s*\\text\s*\{([^{}\d]*)\}(?:\^\s?\{?\d\}?)?[.\s]*$")
_WORD_UNIT = re.compile(
    rf"(?<=[\d}})])\s*\b((?:{ABBREVIATIONS}|\s[a-z]{{3,}})\b(?:\s(?:[a-z.]{{2,}}))*)(?:\^\s?\{{?\d\}}?)?$"
)
_SCALED = re.compile(rf"\b(?:{'|'.join(SCALES)})\b")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
# What a value is given to: `x`, `a_1`, `f(2)`, `AB`, `\theta`, `\angle ABC`, `|AB|`, `(x,y)`, `Area`.
NAME = (
    r"(?:(?:[A-Za-z]{1,2}|[A-Z]{3}|[A-Za-z]{4,}|\\(?!infty|pi)[a-z]+)(?:_\{?\w+\}?)?(?:\([A-Za-z0-9,]*\))?"
    r"|m?\\angle[A-Z]{1,3}|\|[A-Z]{1,2}\||\([a-z](?:,[a-z])+\))"
)
_NAMED_VALUE = re.compile(rf"({NAME})?(?:=|\\approx|\\in(?![a-z]))(.+)")
_SHORT_FRACTION = re.compile(r"\\frac(\d|\{[^{}]*\})(\d|[a-z]|\{[^{}]*\})")
_IN_BASE = re.compile(r"(-?[0-9A-Z.]+)_\{?(\d+)\}?")
_NUMBER = r"\d+(?:\.\d*)?|\.\d+"
_DIGITS_ONLY = re.compile(r"-?\d{1,100}(?:\.\d{1,100})?", re.ASCII)
_NUMBER_ALONE = re.compile(
    rf"([+-]?)(?:({_NUMBER})(?:[eE]([+-]?\d{{1,3}})|\\cdot10\^(?:(\d)|\{{([+-]?\d{{1,3}})\}}))?"
    r"|(?:(\d+)\s?)?\\frac\{(-?\d+)\}\{(-?\d+)\}|(?:(\d+)\s)?\(?(-?\d+)\)?/\(?(-?\d+)\)?)"
)
_WORDS = re.compile(r"\\text\s*\{[^{}]*[A-Za-z]{2}|(?<![A-Za-z])[A-Za-z]{4,}|\\(?:[a-z]?mod|[lcv]?dots)\b")
_COMMAND_NAME = re.compile(r"\\(?:begin|end)\s*\{[A-Za-z*]+\}|\\(?!text|[a-z]?mod|[lcv]?dots)[A-Za-z]+")


def cleaned(answer: str) -> str:
    """An answer as LaTeX in one choice of commands, without layout, unit, currency and degrees."""
    text = " ".join(unwrapped(as_latex(answer)).split())
    if len(text) > MOST_CHARACTERS:
        return text
    for layout, plain in _LAYOUT:
        text = text.replace(layout, plain)
    if "\\" in text:
        text = _COMMAND.sub(lambda found: _SPELLINGS.get(found.group(), found.group()), text)
    text = _SIGNS.sub("", text).strip().rstrip(".,;")
    for word, pattern, latex in _OTHER_NOTATIONS:
        text = pattern.sub(latex, text) if word in text else text
    text = _WORDED_LIST.sub(",", _without_unit(text)).strip().rstrip(".,;")
    if not re.search(r"[(\[]|\\\{", text):  # in `(1,234)` the comma divides two numbers
        text = _THOUSANDS.sub(lambda found: found.group().replace(",", ""), text).replace(";", ",")
    return text[1:-1] if re.fullmatch(r"\{[^{}]*\}|\([^(),]*\)", text) else text


def normalised(answer: str) -> str:
    """One spelling for an answer; the same for answers that differ in layout, units or notation only."""
    if _DIGITS_ONLY.fullmatch(answer):
        return answer
    text = cleaned(answer)
    if len(text) > MOST_CHARACTERS:
        return text
    text = _TEXT.sub(r" \1 ", text)
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text).rstrip(".,;")  # `3 4` is not `34`
    text = _without_names(text)
    text = _SHORT_FRACTION.sub(_whole_fraction, text)
    text = re.sub(r"^\(?([A-Z])\)?$", r"\1", text)
    return text.lower() if text.isalpha() and len(text) > 1 else text


def as_number(normal: str) -> Fraction | None:
    """The value of a normalised answer that is one number: `-7`, `0.5`, `3e5`, `3/4`, `1\\frac{3}{4}`."""
    found = _NUMBER_ALONE.fullmatch(normal) if len(normal) <= MOST_CHARACTERS else None
    if found is None:
        return None
    sign, plain, e, power, long_power, mixed, upper, lower, whole, left, right = found.groups()
    if plain is not None:
        value = Fraction(plain) * Fraction(10) ** int(e or power or long_power or 0)
    elif int(lower or right) == 0:
        return None
    else:
        value = int(mixed or whole or 0) + Fraction(int(upper or left), int(lower or right))
    return -value if sign == "-" else value


def in_base(normal: str) -> tuple[str, str] | None:
    """Digits and base of a normalised answer like `4343_6` or `A5_{11}`."""
    found = _IN_BASE.fullmatch(normal)
    return (found.group(1), found.group(2)) if found else None


def has_words(clean: str) -> bool:
    """Whether a cleaned answer is not mathematics only, or leaves something open (`\\ldots`, `\\mod 7`)."""
    return _WORDS.search(_COMMAND_NAME.sub(" ", clean)) is not None


def _without_unit(text: str) -> str:
    found = _TEXT_UNIT.search(text) or _WORD_UNIT.search(text)
    if found is None or NO_UNIT.search(found.group(1)) or _SCALED.search(found.group(1)):
        return text
    value = text[: found.start()]
    return text if has_words(_WORDED_LIST.sub(",", value)) else value


def _without_names(text: str) -> str:
    """`x=5` is 5, and `x=1,x=2` is 1,2; `x+y=5` is an equation, and `x=1,y=2` says more than its values."""
    named = [_NAMED_VALUE.fullmatch(part) for part in (text.split(",") if text.count("=") > 1 else [text])]
    if not all(one and not re.search(r"=|\\approx", one.group(2)) for one in named):
        return text
    return ",".join(one.group(2) for one in named if one) if len({one.group(1) for one in named if one}) == 1 else text


def _whole_fraction(found: re.Match[str]) -> str:
    upper, lower = (part if part.startswith("{") else f"{{{part}}}" for part in found.groups())
    return f"\\frac{upper}{lower}"
