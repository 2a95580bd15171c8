"""Extract the answer that a response marks: the last box, tag or phrase. Linear in the length of the text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

# The command of a box, up to its opening brace or, without braces, up to its content (\boxed5, \boxed 5).
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])(?:\s*(?=\{)|(?=.))", re.DOTALL)
# End of a box without braces: the end of its formula, line or text.
_UNBRACED_END = re.compile(r"[$\n]|\\[)\]]|\Z")
_ESCAPE_OR_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def last_boxed_only_string(string: str) -> str | None:
    """The last `\\boxed{…}` (`\\fbox{…}`, `\\boxed5`) with its command; None without one, or if it never closes."""
    start = max(string.rfind("\\boxed"), string.rfind("\\fbox"))
    opening = _BOX.match(string, start) if start >= 0 else None
    if opening is None:
        return None
    if string[opening.end()] != "{":
        end = _UNBRACED_END.search(string, opening.end())
        assert end is not None  # the end of the text matches
        return string[start : end.start()]
    depth = 0
    for token in _ESCAPE_OR_BRACE.finditer(string, opening.end()):
        depth += {"{": 1, "}": -1}.get(token.group(), 0)  # 0: an escaped character, such as \{
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
        is_closing = bool(match.group(1))
        if not is_closing:
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
    outside_start: int | None = 0  # where the text after the last block begins; None inside of a block
    any_block = False
    for match in _tags(text, tag):
        is_closing = bool(match.group(1))
        if is_closing:
            # Another closing tag extends the last block; before the first block it is text.
            outside_start = match.end() if any_block else outside_start
            continue
        if outside_start is not None:
            kept.append(text[outside_start : match.start()])
        outside_start, any_block = None, True
    return "".join(kept if outside_start is None else [*kept, text[outside_start:]])


def last_match(pattern: re.Pattern[str], text: str, words: Sequence[str], start: int = 0) -> re.Match[str] | None:
    """The last match, from `start` on, of a pattern whose matches begin with one of `words`; None if there is none.

    The words are found in lower case, in upper case and capitalised. Searching for them, and matching the pattern only
    there, is much faster than searching for the pattern.
    """
    spellings = {spelling for word in words for spelling in (word, word.capitalize(), word.upper())}
    positions = {spelling: text.rfind(spelling, start) for spelling in spellings}
    while (position := max(positions.values())) >= 0:
        if match := pattern.match(text, position):
            return match
        for spelling in [spelling for spelling, at in positions.items() if at == position]:
            positions[spelling] = text.rfind(spelling, start, position + len(spelling) - 1)  # the one before
    return None


def _tags(text: str, name: str) -> Iterator[re.Match[str]]:
    """The tags `<name>` and `</name>` in order. Group 1 of a match is "/" for closing tags, otherwise empty."""
    pattern = re.compile(rf"<\s{{0,3}}(/?)\s{{0,3}}{name}(?:\s[^<>]{{0,100}})?>", re.IGNORECASE)
    position = text.find("<")  # much faster than searching for the pattern
    while position >= 0:
        match = pattern.match(text, position)
        if match is not None:
            yield match
        position = text.find("<", position + 1)
