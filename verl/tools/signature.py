"""A Python function as models see it: JSON Schema of its parameters from type hints, words from its docstring."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Annotated, Any, Literal, Union

# Given by the loop, not by the model.
GIVEN = ("agent_data",)
_PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    type(None): {"type": "null"},
    Any: {},
    object: {},
}
_TYPE_OF_VALUE = {str: "string", bool: "boolean", int: "integer", float: "number"}
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Params|Returns|Return|Yields|Raises|Examples?|Notes?):\s*$")
_PARAMETERS = ("Args", "Arguments", "Parameters", "Params")
_PARAMETER = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


def function_schema(function: Callable[..., Any], name: str | None = None) -> dict[str, Any]:
    """The OpenAI schema of a function. A ValueError says which parameter cannot be told to a model."""
    description, words = docstring_parts(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required = []
    for param, hint in parameters(function).items():
        try:
            schema = schema_of(hint)
        except ValueError as error:
            raise ValueError(f"{function.__name__}({param.name}): {error}") from error
        if "description" not in schema and param.name in words:
            schema["description"] = words[param.name]
        properties[param.name] = schema
        if param.default is param.empty:
            required.append(param.name)
    told = {"name": name or function.__name__, "description": description}
    return {
        "type": "function",
        "function": {**told, "parameters": {"type": "object", "properties": properties, "required": required}},
    }


def parameters(function: Callable[..., Any]) -> dict[inspect.Parameter, Any]:
    """The parameters that the model gives, with their type hints."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ValueError(f"{function.__name__}: a type hint cannot be read: {error}. Give schema=….") from error
    found = {}
    for param in inspect.signature(function).parameters.values():
        if param.name in GIVEN or param.kind is param.VAR_KEYWORD:
            continue
        if param.kind in (param.VAR_POSITIONAL, param.POSITIONAL_ONLY):
            raise ValueError(f"{function.__name__}({param.name}): models give arguments by name. Make it a keyword.")
        if param.name not in hints:
            raise ValueError(
                f"{function.__name__}({param.name}): it has no type hint, so a model cannot know what to give. "
                f"Write {param.name}: str (or another type)."
            )
        found[param] = hints[param.name]
    return found


def schema_of(hint: Any) -> dict[str, Any]:
    """JSON Schema of a type hint. `nullable` marks what may be null, as chat templates expect it."""
    try:
        if hint in _PLAIN:
            return dict(_PLAIN[hint])
    except TypeError:  # not hashable: Literal of a list, …
        pass
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        described = next((extra for extra in args[1:] if isinstance(extra, str)), None)
        return {**schema_of(args[0]), **({"description": described} if described else {})}
    if origin is Literal:
        return _choices(list(args))
    if origin in (Union, types.UnionType):
        return _union(args)
    if isinstance(hint, typing.NewType):
        return schema_of(hint.__supertype__)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _choices([member.value for member in hint])
    if dataclasses.is_dataclass(hint) or typing.is_typeddict(hint):
        return _record(hint)
    return _container(origin or hint, args)


def value_of(hint: Any, value: Any) -> Any:
    """A checked JSON value as the Python object that the hint asks for."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return value_of(args[0], value)
    if origin in (Union, types.UnionType):
        members = [member for member in args if member is not type(None)]
        return value_of(members[0], value) if value is not None and len(members) == 1 else value
    if hint is int and isinstance(value, float):
        return int(value)  # 3.0 is an integer in JSON Schema
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(value)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        hints = typing.get_type_hints(hint, include_extras=True)
        return hint(**{name: value_of(hints.get(name, Any), item) for name, item in value.items()})  # type: ignore[operator]
    if isinstance(value, list):
        return _sequence_of(origin or hint, args, value)
    if isinstance(value, dict) and len(args) == 2:
        return {name: value_of(args[1], item) for name, item in value.items()}
    return value


def docstring_parts(text: str) -> tuple[str, dict[str, str]]:
    """Of a Google docstring: what stands before its first section, and the words on each parameter."""
    description: list[str] = []
    words: dict[str, str] = {}
    section, current, indent = "", "", 0
    for line in text.splitlines():
        heading = _SECTION.match(line)
        if heading:
            section = heading.group(1)
        elif not section:
            description.append(line.strip())
        elif section in _PARAMETERS and line.strip():
            depth = len(line) - len(line.lstrip())
            entry = _PARAMETER.match(line.strip())
            if entry and (not current or depth <= indent):
                current, indent = entry.group(1), depth
                words[current] = entry.group(2).strip()
            elif current:
                words[current] = f"{words[current]} {line.strip()}".strip()
    return "\n".join(description).strip(), words


def _choices(values: list[Any]) -> dict[str, Any]:
    kinds = {type(value) for value in values if value is not None}
    kind = kinds.pop() if len(kinds) == 1 else None
    schema: dict[str, Any] = {"type": _TYPE_OF_VALUE[kind]} if kind in _TYPE_OF_VALUE else {}
    schema["enum"] = [value for value in values if value is not None]
    return {**schema, "nullable": True} if None in values else schema


def _union(members: Sequence[Any]) -> dict[str, Any]:
    schemas = [schema_of(member) for member in members if member is not type(None)]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return schema if len(schemas) == len(members) else {**schema, "nullable": True}


def _record(hint: Any) -> dict[str, Any]:
    """A dataclass or a TypedDict as an object."""
    hints = typing.get_type_hints(hint, include_extras=True)
    if typing.is_typeddict(hint):
        required = sorted(hint.__required_keys__, key=list(hints).index)
        names = list(hints)
    else:
        fields = [each for each in dataclasses.fields(hint) if each.init]
        missing = dataclasses.MISSING
        required = [each.name for each in fields if each.default is missing and each.default_factory is missing]
        names = [each.name for each in fields]
    properties = {name: schema_of(hints[name]) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _container(kind: Any, args: Sequence[Any]) -> dict[str, Any]:
    if isinstance(kind, type) and issubclass(kind, Mapping):
        if args and args[0] is not str:
            raise ValueError(f"{kind.__name__} with keys of {args[0]}: names in JSON are texts. Use dict[str, …].")
        return {"type": "object", **({"additionalProperties": schema_of(args[1])} if args else {})}
    if kind is tuple and args and args[-1] is not Ellipsis:
        items = [schema_of(each) for each in args]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if isinstance(kind, type) and issubclass(kind, (Sequence, Set)) and not issubclass(kind, (str, bytes)):
        unique = {"uniqueItems": True} if issubclass(kind, Set) else {}
        return {"type": "array", "items": schema_of(args[0]) if args else {}, **unique}
    raise ValueError(
        f"the type {getattr(kind, '__name__', kind)} has no form in JSON. Use str, int, float, bool, list, dict, "
        "Literal, an Enum or a dataclass, or give schema=…."
    )


def _sequence_of(kind: Any, args: Sequence[Any], values: list[Any]) -> Any:
    if kind is tuple and args and args[-1] is not Ellipsis:
        return tuple(value_of(hint, value) for hint, value in zip(args, values, strict=True))
    made = [value_of(args[0], value) for value in values] if args else values
    if kind is tuple:
        return tuple(made)
    if isinstance(kind, type) and issubclass(kind, Set):
        return frozenset(made) if kind is frozenset else set(made)
    return made
