"""Unicode mathematics in ASCII and LaTeX: `½`, `√2`, `x²`, `−5`, `３` and `≤` in the one spelling that scorers read."""

from __future__ import annotations

import functools
import re
import unicodedata

_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₙᵢ"
_ON_THE_LINE = str.maketrans(_RAISED + _LOWERED, 2 * "0123456789+-=()ni")
_RAISED_RUN, _LOWERED_RUN = re.compile(f"[{_RAISED}]+"), re.compile(f"[{_LOWERED}]+")
_ROOT = re.compile(r"([√∛∜])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+|[A-Za-z]|\\[a-z]+))")
_INDEX = {"√": "", "∛": "[3]", "∜": "[4]"}
_OUTSIDE_ASCII = re.compile(r"[^\x00-\x7f]")
_NAMES = {
    **dict.fromkeys("×✕✖⨯", "\\times "),
    **dict.fromkeys("·⋅∙•", "\\cdot "),
    **dict.fromkeys("∗＊", "*"),
    **dict.fromkeys("⁄∕", "/"),
    **dict.fromkeys("“”„«»″", '"'),
    **dict.fromkeys("‘’‚‛′`", "'"),
    **dict.fromkeys("。．", "."),
    # Between digits these divide thousands; elsewhere they are space as any other.
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
# Spaces, dashes, invisible marks and pictures.
_PLAIN_CATEGORIES = {"Zs": " ", "Pd": "-", "Cf": "", "So": ""}


def as_latex(text: str) -> str:
    """The text in ASCII where there is a way to say it; ASCII stays as it is."""
    if text.isascii():
        return text
    text = _RAISED_RUN.sub(lambda run: f"^{{{run.group().translate(_ON_THE_LINE)}}}", text)
    text = _LOWERED_RUN.sub(lambda run: f"_{{{run.group().translate(_ON_THE_LINE)}}}", text)
    text = _ROOT.sub(_root, text)
    return _OUTSIDE_ASCII.sub(lambda found: _character(found.group()), text)


@functools.lru_cache(maxsize=4096)
def _character(character: str) -> str:
    if character in _NAMES:
        return _NAMES[character]
    category = unicodedata.category(character)
    if category == "Nd":
        return str(unicodedata.decimal(character))
    if category in _PLAIN_CATEGORIES:
        return _PLAIN_CATEGORIES[category]
    name = unicodedata.name(character, "")
    if name.startswith(("GREEK SMALL LETTER ", "GREEK CAPITAL LETTER ")) and " WITH " not in name:
        letter = name.rpartition(" ")[2].lower()
        return f"\\{letter.capitalize() if 'CAPITAL' in name else letter} "
    plain = unicodedata.normalize("NFKC", character)
    upper, slash, lower = plain.partition("⁄")
    return f"\\frac{{{upper}}}{{{lower}}}" if slash and upper and lower else plain


def _root(found: re.Match[str]) -> str:
    sign, *inside = found.groups()
    return f"\\sqrt{_INDEX[sign]}{{{next(one for one in inside if one is not None)}}}"
