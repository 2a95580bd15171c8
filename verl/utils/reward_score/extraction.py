"""Extract the answer that a response marks: the last box, tag or phrase. Linear in the length of the text."""

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
    """The content of a `\\boxed{…}` as `last_boxed_only_string` returns it; None for anything else."""
    opening = _BOX.match(s) if s is not None else None
    if s is None or opening is None:
        return None
    content = s[opening.end() :]
    return content[1:-1] if content.startswith("{") and content.endswith("}") else content.strip()


def last_boxed(text: str) -> str | None:
    """The content of the last box of a text; None without one."""
    return remove_boxed(last_boxed_only_string(text))


def last_tagged(text: str, tag: str) -> str | None:
    """The content of the last closed `<tag>…</tag>` (or `<Tag >…`), stripped; None without one."""
    start, content = None, None
    for match in _tags(text, tag):
        if not match.group(1):
            start = match.end()
        elif start is not None:
            start, content = None, text[start : match.start()]
    return None if content is None else content.strip()


def without_tagged(text: str, tag: str) -> str:
    """The text without its `<tag>…</tag>` blocks.

    A block ends with the last closing tag before the next block, or with the text: text from a retriever may contain
    closing tags, or be truncated.
    """
    kept: list[str] = []
    outside_from: int | None = 0
    opened = False
    for match in _tags(text, tag):
        if match.group(1):
            outside_from = match.end() if opened else outside_from
            continue
        if outside_from is not None:
            kept.append(text[outside_from : match.start()])
        outside_from, opened = None, True
    return "".join(kept if outside_from is None else [*kept, text[outside_from:]])


def last_match(pattern: re.Pattern[str], text: str, words: Sequence[str], start: int = 0) -> re.Match[str] | None:
    """The last match, from `start` on, of a pattern that begins with one of the words, in any case; None without one.

    Searching for words is much faster than searching for a pattern.
    """
    spellings = {spelling for word in words for spelling in (word, word.capitalize(), word.upper())}
    positions = {spelling: text.rfind(spelling, start) for spelling in spellings}
    while (position := max(positions.values())) >= 0:
        if match := pattern.match(text, position):
            return match
        for spelling in [spelling for spelling, at in positions.items() if at == position]:
            positions[spelling] = text.rfind(spelling, start, position + len(spelling) - 1)
    return None


def _tags(text: str, name: str) -> Iterator[re.Match[str]]:
    """The tags of a name in order; group 1 of closing tags is not empty."""
    pattern = re.compile(rf"<\s{{0,3}}(/?)\s{{0,3}}{name}(?:\s[^<>]{{0,100}})?>", re.IGNORECASE)
    position = text.find("<")  # much faster than searching for the pattern
    while position >= 0:
        match = pattern.match(text, position)
        if match is not None:
            yield match
        position = text.find("<", position + 1)
