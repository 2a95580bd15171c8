"""MCPSearchTool: formats the JSON results of an MCP server's search tool as numbered documents."""

from __future__ import annotations

import json
from typing import Any

from verl.tools.mcp_base_tool import MCPBaseTool

# Keys in order of preference: of the list of results, and of title and text in a result.
_LIST_KEYS = ("results", "documents", "items", "data")
_TITLE_KEYS = ("title", "name", "url", "link", "id")
_TEXT_KEYS = ("content", "text", "snippet", "description", "contents", "body")


class MCPSearchTool(MCPBaseTool):
    """Formats a JSON list of results as lines `Doc 1(Title: …) text`. Other responses stay unchanged."""

    def text_of(self, result: dict[str, Any]) -> str:
        text = super().text_of(result)
        results = _parse_results(text)
        if not results:
            return text
        return "\n".join(
            f"Doc {number}(Title: {title}) {content}" for number, (title, content) in enumerate(results, 1)
        )

    def metrics_of(self, result: dict[str, Any]) -> dict[str, Any]:
        return {"total_results": len(_parse_results(super().text_of(result)))}


def _parse_results(text: str) -> list[tuple[str, str]]:
    """Return (title, text) of each result that has a text; an empty list if `text` is not a JSON list of results."""
    try:
        results = json.loads(text)
    except (ValueError, RecursionError):
        return []
    if isinstance(results, dict):
        results = next((results[name] for name in _LIST_KEYS if isinstance(results.get(name), list)), [])
    if not isinstance(results, list):
        return []
    pairs = [
        (_first_value(result, _TITLE_KEYS), _first_value(result, _TEXT_KEYS))
        for result in results
        if isinstance(result, dict)
    ]
    return [(title, content) for title, content in pairs if content]


def _first_value(result: dict[str, Any], names: tuple[str, ...]) -> str:
    """Return the first value that is not empty, as text."""
    return next((str(result[name]).strip() for name in names if result.get(name)), "")
