"""ArgumentCheck: parse the JSON arguments of a tool call and validate them against the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from referencing.exceptions import Unresolvable

from verl.tools.base_tool import BaseTool

__all__ = ["ArgumentCheck", "CallFailed"]

# Maximum number of validation errors in the message to the model.
_MAX_PROBLEMS = 5


class CallFailed(Exception):
    """A failed tool call. `text`: the message for the model; `kind`: the kind of failure, for metrics."""

    def __init__(self, text: str, kind: str = "exception") -> None:
        super().__init__(text, kind)
        self.text = text
        self.kind = kind


class ArgumentCheck:
    """Parses and validates the arguments of one tool."""

    def __init__(self, tool: BaseTool) -> None:
        self.name = tool.name
        parameters = tool.tool_schema.function.parameters.model_dump()
        self._signature = _signature(parameters)
        if tool.refuses_unknown_arguments:
            parameters.setdefault("additionalProperties", False)
        try:
            Draft202012Validator.check_schema(parameters)
        except SchemaError as error:
            where = "".join(f".{part}" for part in error.absolute_path)
            raise ValueError(f"tool_schema.function.parameters{where}: {error.message}.") from error
        has_patterns = any(f'"{name}"' in json.dumps(parameters, default=str) for name in _PATTERN_KEYS)
        schema = _without_patterns(parameters) if tool.schema_is_remote and has_patterns else parameters
        expanded = _expand_nullable(schema)
        self._is_changed = expanded != parameters
        self._validator = Draft202012Validator(expanded)

    def parse(self, text: str) -> dict[str, Any]:
        """The arguments. CallFailed describes to the model what is wrong and what is expected."""
        try:
            arguments = json.loads(text) if text.strip() else {}
        except (ValueError, RecursionError) as error:
            raise CallFailed(f"Invalid JSON in arguments for '{self.name}': {error}", "malformed") from error
        if not isinstance(arguments, dict):
            problem = f"expected an object of names and values, found {type(arguments).__name__}"
            raise CallFailed(f"Invalid JSON in arguments for '{self.name}': {problem}", "malformed")
        try:
            problems = [_describe(error) for error in self._validator.iter_errors(arguments)]
        except Unresolvable:
            if not self._is_changed:
                raise
            return arguments  # a reference to a part that was removed or moved; the tool checks its arguments
        if problems:
            more = f"; and {len(problems) - _MAX_PROBLEMS} more" if len(problems) > _MAX_PROBLEMS else ""
            listed = "; ".join(problems[:_MAX_PROBLEMS]) + more
            text = f"Error executing tool '{self.name}': {listed}. Expected arguments: {self._signature}"
            raise CallFailed(text, "arguments")
        return arguments


def _describe(error: Any) -> str:
    where = ".".join(str(part) for part in error.absolute_path)
    if error.validator == "required":
        return error.message.removesuffix("property") + "argument" + (f" of '{where}'" if where else "")
    if error.validator == "additionalProperties" and not where and "patternProperties" not in error.schema:
        unknown = sorted(set(error.instance) - set(error.schema.get("properties", {})))
        return f"unknown argument{'s' if len(unknown) > 1 else ''} {', '.join(map(repr, unknown))}"
    return f"argument '{where}': {error.message}" if where else error.message


def _signature(parameters: Mapping[str, Any]) -> str:
    """The arguments in one line: `{"a": integer, "b": string (optional)}`."""
    required = parameters.get("required") or ()
    arguments = []
    for name, schema in (parameters.get("properties") or {}).items():
        kind = (schema.get("type") if isinstance(schema, Mapping) else None) or "any"
        kind = "|".join(kind) if isinstance(kind, list) else kind
        arguments.append(f'"{name}": {kind}' + ("" if name in required else " (optional)"))
    return "{" + ", ".join(arguments) + "}"


# Keys of JSON Schema: with regular expressions; that accept less if other schemas accept more; that accept less if the
# schemas below them accept more; with a mapping from names to schemas; with plain values.
_PATTERN_KEYS = ("pattern", "patternProperties")
_UNEVALUATED_KEYS = ("unevaluatedProperties", "unevaluatedItems")
_INVERTING_KEYS = ("not", "if", "oneOf", "contains")
_MAPPING_KEYS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUE_KEYS = ("enum", "const", "default", "examples", "dependentRequired")


def _without_patterns(schema: Any) -> Any:
    """The schema without regular expressions, which may take exponential time. A remote tool checks them itself.

    The result accepts everything that the schema accepts.
    """
    if isinstance(schema, list):
        return [_without_patterns(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for name, value in schema.items():
        if name in (*_PATTERN_KEYS, *_UNEVALUATED_KEYS):
            continue
        if name == "additionalProperties" and "patternProperties" in schema:
            continue
        plain = _map_schemas(name, value, _without_patterns)
        if name not in _INVERTING_KEYS or (plain == value and not _has_reference(value)):
            kept[name] = plain
    return kept


def _has_reference(schema: Any) -> bool:
    """Whether a part of the schema is defined elsewhere, where patterns may be removed."""
    return any(f'"{name}"' in json.dumps(schema, default=str) for name in ("$ref", "$dynamicRef"))


def _map_schemas(name: str, value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to the schemas in the value of a key of JSON Schema."""
    if name in _VALUE_KEYS:
        return value
    if name in _MAPPING_KEYS and isinstance(value, Mapping):
        return {key: function(item) for key, item in value.items()}
    return function(value)


def _expand_nullable(schema: Any) -> Any:
    """The schema with `nullable: true` (OpenAPI; chat templates read it) expressed in JSON Schema."""
    if isinstance(schema, list):
        return [_expand_nullable(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    plain = {name: _map_schemas(name, value, _expand_nullable) for name, value in schema.items() if name != "nullable"}
    return {"anyOf": [plain, {"type": "null"}]} if schema.get("nullable") is True else plain
