"""function_tool: a decorator that makes a tool of a Python function, its schema taken from the function itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar, overload

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.tools.signature import function_schema, parameters, value_of
from verl.utils.concurrency import call_user_function

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__verl_function_tool__"


@overload
def function_tool(name: F) -> F: ...


@overload
def function_tool(
    name: str | None = None, *, schema: Mapping[str, Any] | OpenAIFunctionToolSchema | None = None
) -> Callable[[F], F]: ...


def function_tool(name: Any = None, *, schema: Any = None) -> Any:
    """`@function_tool`, `@function_tool("name")` or `@function_tool(schema={…})`: models may call the function.

    It stays the function that it was. Its parameters' type hints and its Google docstring make the schema; a parameter
    `agent_data` is not told to the model but given by the loop. It may be async; if not, it runs in a thread. It
    returns a text, a dict, a ToolResponse, or (one of these, reward[, metrics]).
    """
    if callable(name):
        return _mark(name, None, schema)
    return lambda function: _mark(function, name, schema)


class FunctionTool(BaseTool):
    """A marked function as a tool."""

    def __init__(self, function: Callable[..., Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        marked: _Mark | None = getattr(function, _MARK, None)
        schema = tool_schema or (marked.schema if marked else None) or function_schema(function)
        super().__init__({}, OpenAIFunctionToolSchema.model_validate(schema))
        self.function = function
        # With a schema of their own the parameters need no hints.
        self.hints = {} if marked and marked.own else {each.name: hint for each, hint in parameters(function).items()}
        kinds = [each.kind for each in inspect.signature(function).parameters.values()]
        self.refuses_unknown_arguments = inspect.Parameter.VAR_KEYWORD not in kinds

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        values = {name: value_of(self.hints.get(name, Any), value) for name, value in parameters.items()}
        # Only by name: a function that takes any keyword means those of the model.
        given = {name: kwargs[name] for name in inspect.signature(self.function).parameters if name in kwargs}
        return await call_user_function(self.function, **{**values, **given})


def marked_functions(module: ModuleType) -> list[FunctionTool]:
    """The tools of a module: its functions marked with `@function_tool`, in the order in which they are defined."""
    marked = [value for value in vars(module).values() if isinstance(getattr(value, _MARK, None), _Mark)]
    return [FunctionTool(function) for function in dict.fromkeys(marked)]  # one that has two names is one tool


@dataclass(frozen=True)
class _Mark:
    schema: dict[str, Any]
    own: bool
    """Whether the user wrote the schema."""


def _mark(function: F, name: str | None, schema: Any) -> F:
    if schema is None:
        mark = _Mark(function_schema(function, name), own=False)
    else:
        told = OpenAIFunctionToolSchema.model_validate(schema).model_dump()
        if name:
            told["function"]["name"] = name
        mark = _Mark(told, own=True)
    setattr(function, _MARK, mark)
    return function
