"""Normalise answers for all scorers: one canonical form for texts, mathematical answers and numbers.

`normalize_text` for short texts, `normalize_math` and `parse_number` for mathematics; `strip_layout` and
`unicode_to_latex` remove what is only layout or encoding; the tables of LaTeX commands and of units are shared with
`arithmetic`, which reads expressions and the number that a text states.
"""

from __future__ import annotations

import functools
import re
import string
import unicodedata
from collections.abc import Mapping
from fractions import Fraction

_MAX_CHARACTERS = 2000  # longer answers are compared as they are

# -- tables ------------------------------------------------------------------------------------------------------

COMMAND = re.compile(r"\\(?:[A-Za-z]+|.)", re.DOTALL)
LAYOUT_COMMANDS = (
    *("\\!", "\\left", "\\right", "\\displaystyle", "\\bigl", "\\bigr", "\\big", "\\Big"),
    *("\\large", "\\Large", "\\limits"),
)
SPACE_COMMANDS = ("\\;", "\\:", "\\ ", "\\quad", "\\qquad")
MATH_DELIMITERS = ("\\(", "\\)", "\\[", "\\]")
FRACTION_COMMANDS = ("\\dfrac", "\\tfrac", "\\cfrac", "\\nicefrac", "\\sfrac")
FONT_COMMANDS = (
    *("\\textbf", "\\textit", "\\textrm", "\\textnormal", "\\mbox", "\\hbox"),
    *("\\mathrm", "\\mathbf", "\\mathit", "\\rm", "\\bf"),
)

SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
SCALES |= {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9}
# Words after a number that change or retract it; `12 pm` is a time. Other words are units or prose.
NOT_A_UNIT = re.compile(
    r"\b(?:or|nor|not|no|none|never|neither|but|maybe|perhaps|possibly|wrong|incorrect|false|half|quarters?|thirds?|plus|"
    r"minus|squared|cubed|factorial|divided|multiplied|below|modulo|[ap]\.?\s?m)\b|n't\b|[百千万亿億]",
    re.IGNORECASE,
)
UNIT_ABBREVIATIONS = r"(?:mm|cm|dm|km|in|ft|yd|mi|mg|kg|lbs?|oz|ml|mL|cl|hrs?|min|sec|mph|kph|km/h|m/s|USD|EUR|GBP)"


def replace_commands(text: str, replacements: Mapping[str, str]) -> str:
    """Replace LaTeX commands; commands that are not in the table stay."""
    return COMMAND.sub(lambda match: replacements.get(match.group(), match.group()), text)


# -- Unicode ---------------------------------------------------------------------------------------------------------

_SUPERSCRIPT, _SUBSCRIPT = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₙᵢ"
_TO_ASCII = str.maketrans(_SUPERSCRIPT + _SUBSCRIPT, 2 * "0123456789+-=()ni")
_SUPERSCRIPTS, _SUBSCRIPTS = re.compile(f"[{_SUPERSCRIPT}]+"), re.compile(f"[{_SUBSCRIPT}]+")
_ROOT = re.compile(r"([√∛∜])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+|[A-Za-z]|\\[a-z]+))")
_ROOT_INDEX = {"√": "", "∛": "[3]", "∜": "[4]"}
_NON_ASCII = re.compile(r"[^\x00-\x7f]")
_CHARACTERS = {
    **dict.fromkeys("×✕✖⨯", "\\times "),
    **dict.fromkeys("·⋅∙•", "\\cdot "),
    **dict.fromkeys("∗＊", "*"),
    **dict.fromkeys("⁄∕", "/"),
    **dict.fromkeys("“”„«»″", '"'),
    **dict.fromkeys("‘’‚‛′`", "'"),
    **dict.fromkeys("。．", "."),
    # Between digits these separate thousands; elsewhere they are ordinary spaces.
    **dict.fromkeys("\u00a0\u2007\u2009\u202f", "\\,"),
    **dict.fromkeys("→⇒➜", "->"),
    "−": "-",
    "—": ";",
    "÷": "\\div ",
    "±": "\\pm ",
    "∞": "\\infty ",
    "≈": "\\approx ",
    "≡": "\\equiv ",
    "≠": "\\neq ",
    "≤": "\\leq ",
    "≥": "\\geq ",
    "∪": "\\cup ",
    "∩": "\\cap ",
    "∈": "\\in ",
    "∅": "\\emptyset ",
    "°": "^\\circ ",
    "∠": "\\angle ",
    "、": ",",
}
# By Unicode category: spaces, dashes, invisible marks and pictographs.
_CATEGORIES = {"Zs": " ", "Pd": "-", "Cf": "", "So": ""}


def unicode_to_latex(text: str) -> str:
    """Replace Unicode mathematics by ASCII and LaTeX: `½`, `√2`, `x²`, `−5`, `３`, `≤`. ASCII is returned unchanged."""
    if text.isascii():
        return text
    text = _SUPERSCRIPTS.sub(lambda run: f"^{{{run.group().translate(_TO_ASCII)}}}", text)
    text = _SUBSCRIPTS.sub(lambda run: f"_{{{run.group().translate(_TO_ASCII)}}}", text)
    text = _ROOT.sub(_convert_root, text)
    return _NON_ASCII.sub(lambda match: _convert_character(match.group()), text)


@functools.lru_cache(maxsize=4096)
def _convert_character(character: str) -> str:
    if character in _CHARACTERS:
        return _CHARACTERS[character]
    category = unicodedata.category(character)
    if category == "Nd":
        return str(unicodedata.decimal(character))
    if category in _CATEGORIES:
        return _CATEGORIES[category]
    name = unicodedata.name(character, "")
    if name.startswith(("GREEK SMALL LETTER ", "GREEK CAPITAL LETTER ")) and " WITH " not in name:
        letter = name.rpartition(" ")[2].lower()
        return f"\\{letter.capitalize() if 'CAPITAL' in name else letter} "
    plain = unicodedata.normalize("NFKC", character)
    upper, slash, lower = plain.partition("⁄")
    return f"\\frac{{{upper}}}{{{lower}}}" if slash and upper and lower else plain


def _convert_root(match: re.Match[str]) -> str:
    sign, *radicands = match.groups()
    return f"\\sqrt{_ROOT_INDEX[sign]}{{{next(radicand for radicand in radicands if radicand is not None)}}}"


# -- layout ----------------------------------------------------------------------------------------------------------

_QUOTES = [("\\(", "\\)"), ("\\[", "\\]"), *((mark, mark) for mark in ("$", '"', "'", "`", "**", "__", "*", "_"))]
_ANY_LAYOUT = re.compile(r"[\\$\"'`*_<>.,;~]|(?i:answer|equation|solution|expression)")
_WRAPPING_COMMAND = re.compile(r"\\(?:boxed|fbox|text\w*|mbox|math\w*|underline|displaystyle|large|Large)\s*(?=[{\s])")
_LEADING = re.compile(r"(?:\s|~|\\,|\\quad|[-=]>|\\begin\s*\{(?:aligned|align|gather|equation)\*?\}|```[a-z]*\n)+")
_TRAILING = re.compile(
    r"\\end\s*\{(?:aligned|align|gather|equation)\*?\}$|```$|</[A-Za-z]{1,8}>$|<\|[^<>|]{1,30}\|>$|<(?:eos|pad|end_of_turn)>$"
)
_HTML_ELEMENT = re.compile(r"<([A-Za-z]{1,8})>(.*)</\1>", re.DOTALL)
_LABEL = re.compile(
    r"[*_]{0,2}(?:the\s+)?(?:final\s+|correct\s+)?(?:answer|equation|solution|expression)(?:\s+is)?[*_]{0,2}\s*[:：]?[*_]{0,2}\s*",
    re.IGNORECASE,
)


def strip_layout(text: str) -> str:
    """Remove everything around a short answer: markdown, math delimiters, quotes, boxes, fonts, labels, full stops."""
    if _ANY_LAYOUT.search(text) is None:
        return text.strip()
    previous = None
    while text != previous and len(text) <= _MAX_CHARACTERS:
        previous = text
        if start := _LEADING.match(text):
            text = text[start.end() :]
        if element := _HTML_ELEMENT.fullmatch(text):
            text = element.group(2)
        text = _TRAILING.sub("", text.rstrip(" \t\n.,;~\\")).rstrip()
        for opening, closing in _QUOTES:
            if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening) + len(closing):
                text = text[len(opening) : len(text) - len(closing)].strip()
        text = _strip_command(text)
        label = _LABEL.match(text)
        text = text[label.end() :] if label and label.end() < len(text) else text
    return text.strip()


def _strip_command(text: str) -> str:
    """The argument of a command that spans the whole text: `\\boxed{5}`, `\\text{5}`."""
    command = _WRAPPING_COMMAND.match(text)
    argument = text[command.end() :] if command else ""
    if not argument.startswith("{"):
        return argument.strip() if command else text
    depth = 0
    for index, character in enumerate(argument):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return argument[1:-1] if index == len(argument) - 1 else text
    return text


# -- short texts -----------------------------------------------------------------------------------------------------

_PUNCTUATION = str.maketrans("", "", string.punctuation.replace(".", "").replace("-", ""))
# A decimal point and the sign of a number are kept: 3.5 is not 35, nor -5.
_POINT = re.compile(r"\.(?!\d)|(?<=[^\W\d])\.")
_HYPHEN = re.compile(r"(?<=\w)-|-(?!\.?\d)")
_TEXT_LAYOUT = re.compile(r"\\(?:boxed|fbox|mbox|text[a-z]{0,2}|math[a-z]{2})(?=\s*\{)|</?[a-z]{1,8}>")
_MINUS = re.compile(r"(?<!\w)[−–](?=\.?\d)")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalize_text(text: str) -> str:
    """The canonical form of a short text, as for SQuAD (Rajpurkar et al., arXiv 1606.05250): lower case, without
    punctuation, articles and layout, single spaces, Unicode in NFKC."""
    text = text.lower()
    if not text.isascii():
        text = unicodedata.normalize("NFKC", _MINUS.sub("-", text)).casefold()
        text = "".join(filter(_is_visible, text))
    if "\\" in text or "<" in text:
        text = _TEXT_LAYOUT.sub("", text)
    text = _HYPHEN.sub("", _POINT.sub("", text.translate(_PUNCTUATION)))
    return " ".join(_ARTICLES.sub(" ", text).split())


@functools.lru_cache(maxsize=4096)
def _is_visible(character: str) -> bool:
    """Whether a character is neither punctuation nor an invisible mark."""
    return character.isascii() or unicodedata.category(character)[0] not in "PC"


# -- mathematics -----------------------------------------------------------------------------------------------------

_LAYOUT_TEXTS = ((",\\! ", ","), (",\\!", ","), ("{,}", ","), ("~", " "), ("\\left.", ""), ("\\right.", ""))
_MATH_COMMANDS = {
    **dict.fromkeys((*LAYOUT_COMMANDS, *MATH_DELIMITERS, "\\,", "\\$", "\\%"), ""),
    **dict.fromkeys(SPACE_COMMANDS, " "),
    **dict.fromkeys(FRACTION_COMMANDS, "\\frac"),
    **dict.fromkeys(FONT_COMMANDS, "\\text"),
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
# (Text without which the pattern cannot match, pattern, replacement.)
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
_LIST_CONJUNCTION = re.compile(r",?\s*(?:\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z{])(?:and|or)(?![A-Za-z}]))\s*")
# After a value, text is a unit: `12 \text{ cm}^2`, `12 triangles`.
_TEXT_UNIT = re.compile(r"(?<=[\w})\]])\s*\\text\s*\{([^{}\d]*)\}(?:\^\s?\{?\d\}?)?[.\s]*$")
_WORD_UNIT = re.compile(
    rf"(?<=[\d}})])\s*\b((?:{UNIT_ABBREVIATIONS}|\s[a-z]{{3,}})\b(?:\s(?:[a-z.]{{2,}}))*)(?:\^\s?\{{?\d\}}?)?$"
)
_SCALED = re.compile(rf"\b(?:{'|'.join(SCALES)})\b")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
# A name that a value is assigned to: `x`, `a_1`, `f(2)`, `AB`, `\theta`, `\angle ABC`, `|AB|`, `(x,y)`, `Area`.
NAME = (
    r"(?:(?:[A-Za-z]{1,2}|[A-Z]{3}|[A-Za-z]{4,}|\\(?!infty|pi)[a-z]+)(?:_\{?\w+\}?)?(?:\([A-Za-z0-9,]*\))?"
    r"|m?\\angle[A-Z]{1,3}|\|[A-Z]{1,2}\||\([a-z](?:,[a-z])+\))"
)
_NAMED_VALUE = re.compile(rf"({NAME})?(?:=|\\approx|\\in(?![a-z]))(.+)")
_SHORT_FRACTION = re.compile(r"\\frac(\d|\{[^{}]*\})(\d|[a-z]|\{[^{}]*\})")
_IN_BASE = re.compile(r"(-?[0-9A-Z.]+)_\{?(\d+)\}?")
_NUMBER = r"\d+(?:\.\d*)?|\.\d+"
_PLAIN_NUMBER = re.compile(r"-?\d{1,100}(?:\.\d{1,100})?", re.ASCII)
_SINGLE_NUMBER = re.compile(
    rf"([+-]?)(?:({_NUMBER})(?:[eE]([+-]?\d{{1,3}})|\\cdot10\^(?:(\d)|\{{([+-]?\d{{1,3}})\}}))?"
    r"|(?:(\d+)\s?)?\\frac\{(-?\d+)\}\{(-?\d+)\}|(?:(\d+)\s)?\(?(-?\d+)\)?/\(?(-?\d+)\)?)"
)
_WORDS = re.compile(r"\\text\s*\{[^{}]*[A-Za-z]{2}|(?<![A-Za-z])[A-Za-z]{4,}|\\(?:[a-z]?mod|[lcv]?dots)\b")
_COMMAND_NAME = re.compile(r"\\(?:begin|end)\s*\{[A-Za-z*]+\}|\\(?!text|[a-z]?mod|[lcv]?dots)[A-Za-z]+")


def clean_latex(answer: str) -> str:
    """Rewrite an answer as LaTeX with one choice of commands, without layout, unit, currency and degrees."""
    text = " ".join(strip_layout(unicode_to_latex(answer)).split())
    if len(text) > _MAX_CHARACTERS:
        return text
    for layout, plain in _LAYOUT_TEXTS:
        text = text.replace(layout, plain)
    if "\\" in text:
        text = replace_commands(text, _MATH_COMMANDS)
    text = _SIGNS.sub("", text).strip().rstrip(".,;")
    for word, pattern, latex in _OTHER_NOTATIONS:
        text = pattern.sub(latex, text) if word in text else text
    text = _LIST_CONJUNCTION.sub(",", _strip_unit(text)).strip().rstrip(".,;")
    if not re.search(r"[(\[]|\\\{", text):  # in `(1,234)` the comma separates two numbers
        text = _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text).replace(";", ",")
    return text[1:-1] if re.fullmatch(r"\{[^{}]*\}|\([^(),]*\)", text) else text


def normalize_math(answer: str) -> str:
    """The canonical form of a mathematical answer: equal for answers that differ in layout, units or notation only.

    The conventions are those of Minerva (arXiv 2206.14858, appendix D.1), used for MATH since: units, currency, percent
    signs, degrees and spacing do not matter; `\\dfrac12`, `\\frac{1}{2}`, `½` and `1/2` are the same.
    """
    if _PLAIN_NUMBER.fullmatch(answer):
        return answer
    text = clean_latex(answer)
    if len(text) > _MAX_CHARACTERS:
        return text
    text = _TEXT.sub(r" \1 ", text)
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text).rstrip(".,;")  # `3 4` is not `34`
    text = _strip_names(text)
    text = _SHORT_FRACTION.sub(_with_braces, text)
    text = re.sub(r"^\(?([A-Z])\)?$", r"\1", text)
    return text.lower() if text.isalpha() and len(text) > 1 else text


def parse_number(normalized: str) -> Fraction | None:
    """The value of a normalized answer that is one number: `-7`, `0.5`, `3e5`, `3/4`, `1\\frac{3}{4}`."""
    match = _SINGLE_NUMBER.fullmatch(normalized) if len(normalized) <= _MAX_CHARACTERS else None
    if match is None:
        return None
    sign, plain, e, power, long_power, mixed, upper, lower, whole, left, right = match.groups()
    if plain is not None:
        value = Fraction(plain) * Fraction(10) ** int(e or power or long_power or 0)
    elif int(lower or right) == 0:
        return None
    else:
        value = int(mixed or whole or 0) + Fraction(int(upper or left), int(lower or right))
    return -value if sign == "-" else value


def parse_in_base(normalized: str) -> tuple[str, str] | None:
    """Digits and base of a normalized answer like `4343_6` or `A5_{11}`."""
    match = _IN_BASE.fullmatch(normalized)
    return (match.group(1), match.group(2)) if match else None


def contains_words(latex: str) -> bool:
    """Whether a cleaned answer is not only mathematics, or is incomplete (`\\ldots`, `\\mod 7`)."""
    return _WORDS.search(_COMMAND_NAME.sub(" ", latex)) is not None


def _strip_unit(text: str) -> str:
    unit = _TEXT_UNIT.search(text) or _WORD_UNIT.search(text)
    if unit is None or NOT_A_UNIT.search(unit.group(1)) or _SCALED.search(unit.group(1)):
        return text
    value = text[: unit.start()]
    return text if contains_words(_LIST_CONJUNCTION.sub(",", value)) else value


def _strip_names(text: str) -> str:
    """Remove names of values: `x=5` becomes `5`, and `x=1,x=2` becomes `1,2`. An equation (`x+y=5`) and values of
    several names (`x=1,y=2`) are returned unchanged."""
    values = [_NAMED_VALUE.fullmatch(part) for part in (text.split(",") if text.count("=") > 1 else [text])]
    if not all(value and not re.search(r"=|\\approx", value.group(2)) for value in values):
        return text
    names = {value.group(1) for value in values if value}
    return ",".join(value.group(2) for value in values if value) if len(names) == 1 else text


def _with_braces(match: re.Match[str]) -> str:
    upper, lower = (part if part.startswith("{") else f"{{{part}}}" for part in match.groups())
    return f"\\frac{upper}{lower}"
