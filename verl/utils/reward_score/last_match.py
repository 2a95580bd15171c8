"""The last match of a pattern in a text, searched for from the end: answers stand there, and texts are long."""

from __future__ import annotations

import re


def last_match(pattern: re.Pattern[str], text: str, first: int = 0) -> re.Match[str] | None:
    """The last match, from `first` on, of a pattern that does not reach over the end of a line; None without one."""
    end = len(text)
    while end >= first:
        start = max(text.rfind("\n", first, end) + 1, first)
        found = list(pattern.finditer(text, start, end))
        if found:
            return found[-1]
        end = start - 1
    return None
