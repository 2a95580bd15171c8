"""Tools and their calls in conversations: as files have them, and as chat templates take them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any


def as_tools(value: Any, key: str = "tools") -> list[dict[str, Any]] | None:
    """The tools of a row: a list of schemas, or the JSON text of one; what a columnar file filled with null goes.

    A list may hold JSON texts, since schemas of different shapes do not fit into one column. ValueError names `key`.
    """
    value = _parsed(value, repr(key))
    found = [
        _parsed(each, f"schema {number} of {key!r}") for number, each in enumerate(_listed(value or [], repr(key)))
    ]
    wrong = next((number for number, each in enumerate(found) if not isinstance(each, Mapping)), None)
    if wrong is not None:
        raise ValueError(f"schema {wrong} of {key!r} is a {type(found[wrong]).__name__}. Write a list of JSON schemas.")
    return _without_nulls(found) or None


def with_parsed_calls(number: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of tool calls as templates take them: not as text, and without the nulls of a columnar file."""
    changed = dict(message)
    at = f"'tool_calls' of message {number}"
    calls = _without_nulls(_listed(_parsed(changed.get("tool_calls") or [], at), at))
    for call in calls:
        inner = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(inner, dict) or "name" not in inner:
            raise ValueError(f"{at} are not written as [{{function: {{name, arguments}}}}]. Write them so.")
        if isinstance(inner.get("arguments"), str):
            inner["arguments"] = _parsed(inner["arguments"] or "{}", f"the 'arguments' in {at}")
    return changed | {"tool_calls": calls} if calls else changed


def with_written_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of tool calls as JSON text, which some templates take (DeepSeek's)."""
    changed = copy.deepcopy(dict(message))
    for call in changed.get("tool_calls", ()):
        inner = call.get("function", call)
        inner["arguments"] = json.dumps(inner.get("arguments", {}), ensure_ascii=False)
    return changed


def _parsed(value: Any, where: str) -> Any:
    """JSON text as what it says; anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: the text is no JSON ({error}). Correct it.") from error


def _listed(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where} is a {type(value).__name__}. Write a list, or its JSON text.")
    return value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
