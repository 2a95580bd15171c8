"""Arguments of a tool call: read from JSON and checked against the tool's schema, in words the model can act on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from verl.tools.base_tool import BaseTool

_NAMED = 5


class CallFailed(Exception):
    """A call that did not work: what the model is told, and the kind of failure."""

    def __init__(self, text: str, kind: str = "exception") -> None:
        super().__init__(text, kind)
        self.text = text
        self.kind = kind


class ArgumentCheck:
    """Reads and checks the arguments for one tool."""

    def __init__(self, tool: BaseTool) -> None:
        self.name = tool.name
        parameters = tool.tool_schema.function.parameters.model_dump()
        self._shape = _shape(parameters)
        if tool.refuses_unknown_arguments:
            parameters.setdefault("additionalProperties", False)
        try:
            Draft202012Validator.check_schema(parameters)
        except SchemaError as error:
            where = "".join(f".{part}" for part in error.absolute_path)
            raise ValueError(f"tool_schema.function.parameters{where}: {error.message}.") from error
        checked = _without_patterns(parameters) if tool.schema_is_remote else parameters
        self._validator = Draft202012Validator(_with_null(checked))

    def read(self, text: str) -> dict[str, Any]:
        """The arguments; CallFailed says what to write instead."""
        try:
            arguments = json.loads(text) if text.strip() else {}
        except (ValueError, RecursionError) as error:
            raise CallFailed(f"Invalid JSON in arguments for '{self.name}': {error}", "malformed") from error
        if not isinstance(arguments, dict):
            found = f"expected an object of names and values, found {type(arguments).__name__}"
            raise CallFailed(f"Invalid JSON in arguments for '{self.name}': {found}", "malformed")
        problems = [_told(error) for error in self._validator.iter_errors(arguments)]
        if problems:
            more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
            said = "; ".join(problems[:_NAMED]) + more
            text = f"Error executing tool '{self.name}': {said}. Expected arguments: {self._shape}"
            raise CallFailed(text, "arguments")
        return arguments


def _told(error: Any) -> str:
    where = ".".join(str(part) for part in error.absolute_path)
    if error.validator == "required":
        return f"{error.message.replace('property', 'argument')}" + (f" of '{where}'" if where else "")
    if error.validator == "additionalProperties" and not where:
        unknown = sorted(set(error.instance) - set(error.schema.get("properties", {})))
        return f"unknown argument{'s' if len(unknown) > 1 else ''} {', '.join(map(repr, unknown))}"
    return f"argument '{where}': {error.message}" if where else error.message


def _shape(parameters: Mapping[str, Any]) -> str:
    """The arguments in one line: `{"a": integer, "b": string (optional)}`."""
    required = parameters.get("required") or ()
    told = []
    for name, schema in (parameters.get("properties") or {}).items():
        kind = schema.get("type") or "any"
        kind = "|".join(kind) if isinstance(kind, list) else kind
        told.append(f'"{name}": {kind}' + ("" if name in required else " (optional)"))
    return "{" + ", ".join(told) + "}"


_PATTERNS = ("pattern", "patternProperties")
_BY_NAME = ("properties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("enum", "const", "default", "examples")


def _without_patterns(schema: Any) -> Any:
    """The schema without regular expressions, which may take exponential time. A remote tool checks them itself."""
    if isinstance(schema, list):
        return [_without_patterns(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    rest: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _BY_NAME and isinstance(value, Mapping):
            rest[name] = {key: _without_patterns(each) for key, each in value.items()}
        elif name not in _PATTERNS:
            rest[name] = value if name in _VALUES else _without_patterns(value)
    return rest


def _with_null(schema: Any) -> Any:
    """`nullable: true` (OpenAPI, and what chat templates read) in words of JSON Schema."""
    if isinstance(schema, list):
        return [_with_null(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    plain = {name: _with_null(value) for name, value in schema.items() if name not in ("nullable", "enum", "const")}
    plain |= {name: schema[name] for name in ("enum", "const") if name in schema}
    return {"anyOf": [plain, {"type": "null"}]} if schema.get("nullable") is True else plain
