"""Where a model marks its answer: the last box, the last tag, the last phrase; found in time linear in the text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])(?:\s*(?=\{)|(?=.))", re.DOTALL)
_STRUCTURE = re.compile(r"\\.|[{}]", re.DOTALL)


def last_boxed_only_string(string: str) -> str | None:
    """The last `\\boxed{…}` (`\\fbox{…}`, `\\boxed5`) with its command; None without one, or if it never closes."""
    start = max(string.rfind("\\boxed"), string.rfind("\\fbox"))
    opening = _BOX.match(string, start) if start >= 0 else None
    if opening is None:
        return None
    if string[opening.end()] != "{":
        end = re.compile(r"[$\n]|\\[)\]]|\Z").search(string, opening.end())
        assert end is not None
        return string[start : end.start()]
    depth = 0
    for token in _STRUCTURE.finditer(string, opening.end()):
        depth += {"{": 1, "}": -1}.get(token.group(), 0)  # an escaped brace is a character, not a bracket
        if depth == 0:
            return string[start : token.end()]
    return None


def remove_boxed(s: str | None) -> str | None:
    """What stands in a `\\boxed{…}` that `last_boxed_only_string` found; None for anything else."""
    opening = _BOX.match(s) if s is not None else None
    if s is None or opening is None:
        return None
    inside = s[opening.end() :]
    return inside[1:-1] if inside.startswith("{") and inside.endswith("}") else inside.strip()


def last_boxed(text: str) -> str | None:
    """What stands in the last box of a text; None without one."""
    return remove_boxed(last_boxed_only_string(text))


def last_tagged(text: str, tag: str) -> str | None:
    """What stands in the last closed `<tag>…</tag>` (or `<Tag >…`), stripped; None without one."""
    opened, inside = None, None
    for found in _tags(text, tag):
        if not found.group(1):
            opened = found.end()
        elif opened is not None:
            opened, inside = None, text[opened : found.start()]
    return None if inside is None else inside.strip()


def without_tagged(text: str, tag: str) -> str:
    """The text without its `<tag>…</tag>` blocks.

    A block ends with the last closing tag before the next one opens, or with the text: what comes from outside may hold
    closing tags of its own, or be cut off in the middle.
    """
    kept: list[str] = []
    outside_from: int | None = 0
    opened = False
    for found in _tags(text, tag):
        if found.group(1):
            outside_from = found.end() if opened else outside_from
            continue
        if outside_from is not None:
            kept.append(text[outside_from : found.start()])
        outside_from, opened = None, True
    return "".join(kept if outside_from is None else [*kept, text[outside_from:]])


def last_match(pattern: re.Pattern[str], text: str, words: Sequence[str], first: int = 0) -> re.Match[str] | None:
    """The last match, from `first` on, of a pattern that begins with one of the words, in any case; None without one.

    A search for a word is much faster than one for a pattern.
    """
    spellings = {spelling for word in words for spelling in (word, word.capitalize(), word.upper())}
    places = {spelling: text.rfind(spelling, first) for spelling in spellings}
    while (place := max(places.values())) >= 0:
        if found := pattern.match(text, place):
            return found
        for spelling in [one for one, at in places.items() if at == place]:
            places[spelling] = text.rfind(spelling, first, place + len(spelling) - 1)
    return None


def _tags(text: str, name: str) -> Iterator[re.Match[str]]:
    """The tags of a name in order; the group of those that close is not empty."""
    pattern = re.compile(rf"<\s{{0,3}}(/?)\s{{0,3}}{name}(?:\s[^<>]{{0,100}})?>", re.IGNORECASE)
    place = text.find("<")  # a search for one character is much faster than one for a pattern
    while place >= 0:
        found = pattern.match(text, place)
        if found is not None:
            yield found
        place = text.find("<", place + 1)
