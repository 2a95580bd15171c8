"""Answers between tags, `<answer>…</answer>`: the last whole one counts. Plain searches, no backtracking."""

from __future__ import annotations


def last_tagged(text: str, tag: str) -> str | None:
    """What stands in the last closed `<tag>…</tag>`, stripped; None without one."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return text[start + len(tag) + 2 : end].strip() if start >= 0 else None


def without_tagged(text: str, tag: str) -> str:
    """The text without its closed `<tag>…</tag>` blocks."""
    kept, position = [], 0
    while (start := text.find(f"<{tag}>", position)) >= 0 and (end := text.find(f"</{tag}>", start)) >= 0:
        kept.append(text[position:start])
        position = end + len(tag) + 3
    return "".join(kept) + text[position:]
