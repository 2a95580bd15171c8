"""What a tool call is, and what parsers have in common: calls between two markers, JSON, values that bear no type.

Every parser takes time in proportion to the text, whatever the model has written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Parser", "Schemas", "ToolCall", "between", "call_of", "json_call", "value_call"]

Schemas = Sequence[Mapping[str, Any]]
"""Tools as the OpenAI API describes them: {type: function, function: {name, parameters}}."""

_THOUGHT = "</think>"
# A call that is no JSON still names its tool most times; the model is told about that one.
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]{1,64})')
_PYTHON = {"True": True, "False": False, "None": None}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model wrote."""

    name: str
    arguments: str
    """A JSON object; where `error` is set, what stands in its place."""
    error: str | None = None
    """Why it cannot be run, in the words that the model is given."""


class Parser(Protocol):
    """How a family of models writes calls."""

    def parse(self, text: str, schemas: Schemas = ()) -> tuple[str, list[ToolCall]]:
        """What is said besides the calls, and the calls in their order.

        `text` is one turn with its special tokens, without the one that ended it. `schemas` are those of the tools:
        formats that write all values alike take the types from there.
        """
        ...


def between(text: str, start: str, end: str) -> tuple[str, list[str]]:
    """The text without what stands between the markers, and what stands there; the last may lack its end.

    What is thought before `</think>` is said and never called. White space around calls is dropped.
    """
    thought, mark, spoken = text.rpartition(_THOUGHT)
    said, bodies, at = [thought, mark], [], 0
    while (begin := spoken.find(start, at)) >= 0:
        said.append(spoken[at:begin].rstrip())
        stop = spoken.find(end, begin + len(start))
        stop = len(spoken) if stop < 0 else stop
        bodies.append(spoken[begin + len(start) : stop])
        at = stop + len(end)
    rest = spoken[at:]
    return "".join([*said, rest.rstrip() if bodies else rest]), bodies


def json_call(text: str) -> ToolCall:
    """The call in {"name": …, "arguments": {…}}; some models say parameters."""
    try:
        call = _read(text)
    except ValueError as error:
        found = _NAME.search(text)
        return _invalid(found.group(1) if found else "", text, str(error))
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return _invalid("", text, 'a call is {"name": …, "arguments": {…}}')
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):  # some models write JSON into the JSON
        return call_of(call["name"], arguments)
    return _checked(call["name"], {} if arguments is None else arguments, text)


def call_of(name: str, arguments: str) -> ToolCall:
    """The call of a tool whose arguments are written as JSON; none at all are an empty object."""
    try:
        return _checked(name, _read(arguments) if arguments.strip() else {}, arguments)
    except ValueError as error:
        return _invalid(name, arguments, str(error))


def value_call(name: str, values: Iterable[tuple[str, str]], schemas: Schemas) -> ToolCall:
    """The call of a tool whose arguments are written one by one, without their types."""
    types = next((_types(tool) for tool in schemas if tool.get("function", {}).get("name") == name), {})
    return _checked(name, {key: _value(text, types.get(key)) for key, text in values}, "")


def _value(text: str, types: Sequence[str] | None) -> Any:
    """A value that bears no type: text where the schema says so (`types`), else JSON if it is JSON, else text."""
    if types is not None and "string" in types:
        return text
    if text in _PYTHON:
        return _PYTHON[text]
    try:
        return _read(text)
    except ValueError:
        return text


def _types(tool: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    """Of every parameter with a type: its types."""
    properties = tool["function"].get("parameters", {}).get("properties", {})
    declared = {name: schema["type"] for name, schema in properties.items() if "type" in schema}
    return {name: [types] if isinstance(types, str) else types for name, types in declared.items()}


def _checked(name: str, arguments: Any, text: str) -> ToolCall:
    if not isinstance(arguments, dict):
        return _invalid(name, text, "they must be an object, {…}")
    return ToolCall(name, _write(arguments))


def _invalid(name: str, text: str, why: str) -> ToolCall:
    return ToolCall(name, text, f"Invalid JSON in arguments for '{name[:64]}': {why}")


def _read(text: str) -> Any:
    """JSON; ValueError for anything else, whatever it is."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _write(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can write and UTF-8 cannot
        return json.dumps(value)
    return text
