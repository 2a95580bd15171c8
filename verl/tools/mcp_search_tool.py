"""MCPSearchTool: a search tool of an MCP server, its results written out as numbered documents."""

from __future__ import annotations

import json
from typing import Any

from verl.tools.mcp_base_tool import MCPBaseTool

_LISTS = ("results", "documents", "items", "data")
_TITLES = ("title", "name", "url", "link", "id")
_TEXTS = ("content", "text", "snippet", "description", "contents", "body")


class MCPSearchTool(MCPBaseTool):
    """Servers answer searches with JSON; the model reads `Doc 1(Title: …) text`. Other answers stay as they are."""

    def text_of(self, answer: dict[str, Any]) -> str:
        text = super().text_of(answer)
        results = _results(text)
        if not results:
            return text
        return "\n".join(f"Doc {number}(Title: {title}) {said}" for number, (title, said) in enumerate(results, 1))

    def metrics_of(self, answer: dict[str, Any]) -> dict[str, Any]:
        return {"total_results": len(_results(super().text_of(answer)))}


def _results(text: str) -> list[tuple[str, str]]:
    """(title, text) of each result, where the text is JSON that lists some."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    if isinstance(found, dict):
        found = next((found[name] for name in _LISTS if isinstance(found.get(name), list)), [])
    if not isinstance(found, list):
        return []
    pairs = [(_first(each, _TITLES), _first(each, _TEXTS)) for each in found if isinstance(each, dict)]
    return [(title, said) for title, said in pairs if said]


def _first(result: dict[str, Any], names: tuple[str, ...]) -> str:
    return next((str(result[name]).strip() for name in names if result.get(name)), "")
