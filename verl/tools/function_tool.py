"""function_tool: a decorator that makes a Python function a tool. Its JSON Schema is derived from the type hints, the
descriptions from the docstring."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Annotated, Any, Literal, TypeVar, Union, overload

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.concurrency import call_user_function

F = TypeVar("F", bound=Callable[..., Any])
# Attribute of decorated functions: a `_Mark`.
_MARK = "__verl_function_tool__"
# Parameters that the agent loop passes, not the model.
_LOOP_PARAMETERS = ("agent_data",)
_PLAIN_TYPES: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    type(None): {"type": "null"},
    Any: {},
    object: {},
}
_TYPE_QUALIFIERS = tuple(
    getattr(typing, name) for name in ("Required", "NotRequired", "ReadOnly") if hasattr(typing, name)
)
_TYPE_OF_VALUE = {str: "string", bool: "boolean", int: "integer", float: "number"}
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Params|Returns|Return|Yields|Raises|Examples?|Notes?):\s*$")
_PARAMETER_SECTIONS = ("Args", "Arguments", "Parameters", "Params")
_PARAMETER = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


@overload
def function_tool(name: F) -> F: ...


@overload
def function_tool(
    name: str | None = None, *, schema: Mapping[str, Any] | OpenAIFunctionToolSchema | None = None
) -> Callable[[F], F]: ...


def function_tool(name: Any = None, *, schema: Any = None) -> Any:
    """Make a function a tool: `@function_tool`, `@function_tool("name")` or `@function_tool(schema={…})`.

    Returns the function unchanged. The schema is derived from type hints and the Google docstring, without the
    parameter `agent_data`, which the loop passes. The function may be async; if not, it runs in a thread. It returns a
    text, a dict, a ToolResponse, or (one of these, reward[, metrics]).
    """
    if callable(name):
        return _mark(name, None, schema)
    return lambda function: _mark(function, name, schema)


class FunctionTool(BaseTool):
    """A tool that calls a function. `tool_schema` replaces the schema of the decorator or of the type hints."""

    def __init__(self, function: Callable[..., Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        marked: _Mark | None = getattr(function, _MARK, None)
        schema = tool_schema or (marked.schema if marked else None) or function_schema(function)
        super().__init__({}, OpenAIFunctionToolSchema.model_validate(schema))
        self.function = function
        # With a schema of the user, arguments are not converted, and the parameters need no type hints.
        self.hints = {} if marked and marked.is_custom else _hints_by_name(function)
        kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
        self.refuses_unknown_arguments = inspect.Parameter.VAR_KEYWORD not in kinds

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        values = {name: convert_value(self.hints.get(name, Any), value) for name, value in parameters.items()}
        # Arguments of the loop are passed to named parameters only: `**kwargs` receives arguments of the model.
        loop_kwargs = {name: kwargs[name] for name in inspect.signature(self.function).parameters if name in kwargs}
        return await call_user_function(self.function, **{**values, **loop_kwargs})


def marked_functions(module: types.ModuleType) -> list[FunctionTool]:
    """The tools of a module: its functions decorated with `@function_tool`, in the order of definition."""
    marked = [value for value in vars(module).values() if isinstance(getattr(value, _MARK, None), _Mark)]
    return [FunctionTool(function) for function in dict.fromkeys(marked)]  # a function with two names is one tool


@dataclasses.dataclass(frozen=True)
class _Mark:
    """The schema that the decorator stores in an attribute of the function."""

    schema: dict[str, Any]
    is_custom: bool
    """Whether the user wrote the schema."""


def _mark(function: F, name: str | None, schema: Any) -> F:
    if schema is None:
        mark = _Mark(function_schema(function, name), is_custom=False)
    else:
        custom = OpenAIFunctionToolSchema.model_validate(schema).model_dump()
        if name:
            custom["function"]["name"] = name
        mark = _Mark(custom, is_custom=True)
    setattr(function, _MARK, mark)
    return function


def function_schema(function: Callable[..., Any], name: str | None = None) -> dict[str, Any]:
    """The OpenAI schema of a function. A ValueError names a parameter whose type cannot be expressed in JSON."""
    description, descriptions = parse_docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required = []
    for param, hint in _model_parameters(function).items():
        try:
            schema = type_schema(hint)
        except ValueError as error:
            raise ValueError(f"{function.__name__}({param.name}): {error}") from error
        if "description" not in schema and param.name in descriptions:
            schema["description"] = descriptions[param.name]
        properties[param.name] = schema
        if param.default is param.empty:
            required.append(param.name)
    return {
        "type": "function",
        "function": {
            "name": name or function.__name__,
            "description": description,
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }


def _hints_by_name(function: Callable[..., Any]) -> dict[str, Any]:
    return {parameter.name: hint for parameter, hint in _model_parameters(function).items()}


def _model_parameters(function: Callable[..., Any]) -> dict[inspect.Parameter, Any]:
    """The type hints of the parameters whose arguments the model passes. ValueError: a parameter cannot be passed by
    name, or has no hint."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ValueError(f"{function.__name__}: a type hint cannot be resolved: {error}. Pass schema=….") from error
    hints_by_parameter = {}
    for param in inspect.signature(function).parameters.values():
        if param.name in _LOOP_PARAMETERS or param.kind is param.VAR_KEYWORD:
            continue
        if param.kind in (param.VAR_POSITIONAL, param.POSITIONAL_ONLY):
            raise ValueError(
                f"{function.__name__}({param.name}): models pass arguments by name. Make it a keyword parameter."
            )
        if param.name not in hints:
            raise ValueError(
                f"{function.__name__}({param.name}): it has no type hint, which the schema needs. "
                f"Write {param.name}: str (or another type)."
            )
        hints_by_parameter[param] = hints[param.name]
    return hints_by_parameter


def type_schema(hint: Any) -> dict[str, Any]:
    """JSON Schema of a type hint. `nullable` marks optional values, as chat templates expect."""
    try:
        if hint in _PLAIN_TYPES:
            return dict(_PLAIN_TYPES[hint])
    except TypeError:  # not hashable: Literal of a list, …
        pass
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        description = next((extra for extra in args[1:] if isinstance(extra, str)), None)
        return {**type_schema(args[0]), **({"description": description} if description else {})}
    if origin in _TYPE_QUALIFIERS:
        return type_schema(args[0])
    if origin is Literal:
        return _enum_schema(list(args))
    if origin in (Union, types.UnionType):
        return _union_schema(args)
    if isinstance(hint, typing.NewType):
        return type_schema(hint.__supertype__)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _enum_schema([member.value for member in hint])
    if dataclasses.is_dataclass(hint) or typing.is_typeddict(hint):
        return _object_schema(hint)
    return _container_schema(origin or hint, args)


def convert_value(hint: Any, value: Any) -> Any:
    """Convert a JSON value that matches `type_schema(hint)` to the type of the hint.

    Values of unions of several types are returned unchanged: JSON does not tell which one is meant.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated or origin in _TYPE_QUALIFIERS:
        return convert_value(args[0], value)
    if isinstance(hint, typing.NewType):
        return convert_value(hint.__supertype__, value)
    if origin in (Union, types.UnionType):
        members = [member for member in args if member is not type(None)]
        return convert_value(members[0], value) if value is not None and len(members) == 1 else value
    if hint is int and isinstance(value, float):
        return int(value)  # 3.0 is an integer in JSON Schema
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(value)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        hints = typing.get_type_hints(hint, include_extras=True)
        return hint(**{name: convert_value(hints.get(name, Any), item) for name, item in value.items()})  # type: ignore[operator]
    if typing.is_typeddict(hint) and isinstance(value, dict):
        hints = typing.get_type_hints(hint, include_extras=True)
        return {name: convert_value(hints.get(name, Any), item) for name, item in value.items()}
    if isinstance(value, list):
        return _convert_sequence(origin or hint, args, value)
    if isinstance(value, dict) and len(args) == 2:
        return {name: convert_value(args[1], item) for name, item in value.items()}
    return value


def parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The text of a Google docstring before its first section, and the descriptions of the parameters."""
    description: list[str] = []
    descriptions: dict[str, str] = {}
    section, current, indent = "", "", 0
    for line in text.splitlines():
        heading = _SECTION.match(line)
        if heading:
            section = heading.group(1)
        elif not section:
            description.append(line.strip())
        elif section in _PARAMETER_SECTIONS and line.strip():
            depth = len(line) - len(line.lstrip())
            entry = _PARAMETER.match(line.strip())
            # A more deeply indented line continues a description, even if it looks like an entry ("note: …").
            if entry and (not current or depth <= indent):
                current, indent = entry.group(1), depth
                descriptions[current] = entry.group(2).strip()
            elif current:
                descriptions[current] = f"{descriptions[current]} {line.strip()}".strip()
    return "\n".join(description).strip(), descriptions


def _enum_schema(values: list[Any]) -> dict[str, Any]:
    """JSON Schema of a choice of values. It has a type if all values but None have the same."""
    types_of_values = {type(value) for value in values if value is not None}
    common = types_of_values.pop() if len(types_of_values) == 1 else None
    schema: dict[str, Any] = {"type": _TYPE_OF_VALUE[common]} if common in _TYPE_OF_VALUE else {}
    schema["enum"] = [value for value in values if value is not None]
    return {**schema, "nullable": True} if None in values else schema


def _union_schema(members: Sequence[Any]) -> dict[str, Any]:
    schemas = [type_schema(member) for member in members if member is not type(None)]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return schema if len(schemas) == len(members) else {**schema, "nullable": True}


def _object_schema(hint: Any) -> dict[str, Any]:
    """JSON Schema of a dataclass or a TypedDict."""
    hints = typing.get_type_hints(hint, include_extras=True)
    if typing.is_typeddict(hint):
        required = sorted(hint.__required_keys__, key=list(hints).index)
        names = list(hints)
    else:
        fields = [item for item in dataclasses.fields(hint) if item.init]
        missing = dataclasses.MISSING
        required = [item.name for item in fields if item.default is missing and item.default_factory is missing]
        names = [item.name for item in fields]
    properties = {name: type_schema(hints[name]) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _container_schema(kind: Any, args: Sequence[Any]) -> dict[str, Any]:
    """JSON Schema of a container class `kind` with the type arguments `args`. ValueError for other types."""
    if isinstance(kind, type) and issubclass(kind, Mapping):
        if args and args[0] is not str:
            raise ValueError(
                f"{kind.__name__} with keys of {args[0]}: keys of JSON objects are strings. Use dict[str, …]."
            )
        return {"type": "object", **({"additionalProperties": type_schema(args[1])} if args else {})}
    if kind is tuple and args and args[-1] is not Ellipsis:
        items = [type_schema(arg) for arg in args]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if isinstance(kind, type) and issubclass(kind, (Sequence, Set)) and not issubclass(kind, (str, bytes)):
        unique = {"uniqueItems": True} if issubclass(kind, Set) else {}
        return {"type": "array", "items": type_schema(args[0]) if args else {}, **unique}
    raise ValueError(
        f"the type {getattr(kind, '__name__', kind)} cannot be expressed in JSON Schema. Use str, int, float, "
        "bool, list, dict, Literal, an Enum or a dataclass, or pass schema=…."
    )


def _convert_sequence(kind: Any, args: Sequence[Any], values: list[Any]) -> Any:
    """Convert a list to the container class `kind` with the type arguments `args`."""
    if kind is tuple and args and args[-1] is not Ellipsis:
        return tuple(convert_value(hint, value) for hint, value in zip(args, values, strict=True))
    items = [convert_value(args[0], value) for value in values] if args else values
    if kind is tuple:
        return tuple(items)
    if isinstance(kind, type) and issubclass(kind, Set):
        return frozenset(items) if kind is frozenset else set(items)
    return items
