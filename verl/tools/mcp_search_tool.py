"""MCPSearchTool: a search tool of an MCP server whose JSON results are formatted as numbered documents."""

from __future__ import annotations

import json
from typing import Any

from verl.tools.mcp_base_tool import MCPBaseTool

# Keys of the result list, and of title and text in a result, in order of preference.
_LISTS = ("results", "documents", "items", "data")
_TITLES = ("title", "name", "url", "link", "id")
_TEXTS = ("content", "text", "snippet", "description", "contents", "body")


class MCPSearchTool(MCPBaseTool):
    """Formats JSON results as `Doc 1(Title: …) text`. Other responses stay unchanged."""

    def text_of(self, answer: dict[str, Any]) -> str:
        text = super().text_of(answer)
        results = _results(text)
        if not results:
            return text
        return "\n".join(
            f"Doc {number}(Title: {title}) {content}" for number, (title, content) in enumerate(results, 1)
        )

    def metrics_of(self, answer: dict[str, Any]) -> dict[str, Any]:
        return {"total_results": len(_results(super().text_of(answer)))}


def _results(text: str) -> list[tuple[str, str]]:
    """(title, text) of each result; empty if the text is not a JSON list of results."""
    try:
        results = json.loads(text)
    except (ValueError, RecursionError):
        return []
    if isinstance(results, dict):
        results = next((results[name] for name in _LISTS if isinstance(results.get(name), list)), [])
    if not isinstance(results, list):
        return []
    pairs = [(_first(result, _TITLES), _first(result, _TEXTS)) for result in results if isinstance(result, dict)]
    return [(title, content) for title, content in pairs if content]


def _first(result: dict[str, Any], names: tuple[str, ...]) -> str:
    return next((str(result[name]).strip() for name in names if result.get(name)), "")
