"""Answers between tags, `<answer>…</answer>`: the last whole one counts. Tags may be written `<Answer >`, too."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator


def last_tagged(text: str, tag: str) -> str | None:
    """What stands in the last closed `<tag>…</tag>`, stripped; None without one."""
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


def _tags(text: str, name: str) -> Iterator[re.Match[str]]:
    """The tags of a name in order; the group of those that close is not empty."""
    pattern = _pattern(name)
    place = text.find("<")  # a search for one character is much faster than one for a pattern
    while place >= 0:
        found = pattern.match(text, place)
        if found is not None:
            yield found
        place = text.find("<", place + 1)


@functools.lru_cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(rf"<\s{{0,3}}(/?)\s{{0,3}}{name}(?:\s[^<>]{{0,100}})?>", re.IGNORECASE)
