"""The last `\\boxed{…}` of a text, where models put a result; found in time linear in the text."""

from __future__ import annotations

import re

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
