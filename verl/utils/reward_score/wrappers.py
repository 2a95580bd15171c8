"""Layout around a short answer: markdown, signs of mathematics, quotes, boxes, fonts, a label, a full stop."""

from __future__ import annotations

import re

# Longer texts are no short answers.
MOST_CHARACTERS = 2000

_PAIRS = [("\\(", "\\)"), ("\\[", "\\]"), *((mark, mark) for mark in ("$", '"', "'", "`", "**", "__", "*", "_"))]
_ANY = re.compile(r"[\\$\"'`*_<>.,;~]|(?i:answer|equation|solution|expression)")
_COMMAND = re.compile(r"\\(?:boxed|fbox|text\w*|mbox|math\w*|underline|displaystyle|large|Large)\s*(?=[{\s])")
_BEFORE = re.compile(r"(?:\s|~|\\,|\\quad|[-=]>|\\begin\s*\{(?:aligned|align|gather|equation)\*?\}|```[a-z]*\n)+")
_BEHIND = re.compile(
    r"\\end\s*\{(?:aligned|align|gather|equation)\*?\}$|```$|</[A-Za-z]{1,8}>$|<\|[^<>|]{1,30}\|>$|<(?:eos|pad|end_of_turn)>$"
)
_ELEMENT = re.compile(r"<([A-Za-z]{1,8})>(.*)</\1>", re.DOTALL)
_LABEL = re.compile(
    r"[*_]{0,2}(?:the\s+)?(?:final\s+|correct\s+)?(?:answer|equation|solution|expression)(?:\s+is)?[*_]{0,2}\s*[:：]?[*_]{0,2}\s*",
    re.IGNORECASE,
)


def unwrapped(text: str) -> str:
    """What is inside, once everything around it is off."""
    if _ANY.search(text) is None:
        return text.strip()
    before = None
    while text != before and len(text) <= MOST_CHARACTERS:
        before = text
        if start := _BEFORE.match(text):
            text = text[start.end() :]
        if element := _ELEMENT.fullmatch(text):
            text = element.group(2)
        text = _BEHIND.sub("", text.rstrip(" \t\n.,;~\\")).rstrip()
        for opening, closing in _PAIRS:
            if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening) + len(closing):
                text = text[len(opening) : len(text) - len(closing)].strip()
        text = _inside_command(text)
        label = _LABEL.match(text)
        text = text[label.end() :] if label and label.end() < len(text) else text
    return text.strip()


def _inside_command(text: str) -> str:
    """What stands in a command's braces that begin and end the text: `\\boxed{5}`, `\\text{5}`."""
    command = _COMMAND.match(text)
    inside = text[command.end() :] if command else ""
    if not inside.startswith("{"):
        return inside.strip() if command else text
    depth = 0
    for place, character in enumerate(inside):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return inside[1:-1] if place == len(inside) - 1 else text
    return text
