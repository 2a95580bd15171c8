"""Layout around a short answer: markdown, signs of mathematics, quotes, boxes, fonts, a label, a full stop."""

from __future__ import annotations

import re

# Longer texts are no short answers.
MOST_CHARACTERS = 2000

_PAIRS = [("\\(", "\\)"), ("\\[", "\\]"), *((mark, mark) for mark in ("$", '"', "'", "`", "**", "__", "*", "_"))]
_ANY = re.compile(r"[\\$\"'`*_<.,;]|[Aa][Nn][Ss][Ww][Ee][Rr]")
_BOX = re.compile(r"\\(?:boxed|fbox|text\w*|mbox|math\w*|underline|displaystyle|large|Large)\s*(?=[{\s])")
_TOKEN_AT_END = re.compile(r"(?:</?[A-Za-z]{1,8}>|<\|[^<>|]{1,30}\|>)\s*$")
_LABEL = re.compile(
    r"\s*(?:[*_]{0,2})(?:the\s+)?(?:final\s+|correct\s+)?answer(?:\s+is)?[*_]{0,2}\s*[:：]?[*_]{0,2}\s*", re.I
)


def unwrapped(text: str) -> str:
    """What is inside, once everything around it is off."""
    if _ANY.search(text) is None:
        return text.strip()
    before = None
    while text != before and len(text) <= MOST_CHARACTERS:
        before = text
        text = _TOKEN_AT_END.sub("", text.strip().rstrip(".,;").strip())
        for opening, closing in _PAIRS:
            if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening) + len(closing):
                text = text[len(opening) : len(text) - len(closing)].strip()
        text = _inside_box(text)
        label = _LABEL.match(text)
        text = text[label.end() :] if label and label.end() < len(text) else text
    return text


def _inside_box(text: str) -> str:
    """What stands in a command's braces that begin and end the text: `\\boxed{5}`, `\\text{5}`."""
    command = _BOX.match(text)
    inside = text[command.end() :] if command else ""
    if not inside.startswith("{"):
        return inside.strip() if command else text
    depth = 0
    for place, character in enumerate(inside):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return inside[1:-1] if place == len(inside) - 1 else text
    return text
