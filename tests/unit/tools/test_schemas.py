"""Tool schemas keep what they are given, whatever JSON Schema it holds."""

from __future__ import annotations

from types import ModuleType
from unittest.mock import Mock

import pytest

from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FunctionTool, function_tool, marked_functions
from verl.tools.schemas import OpenAIFunctionParametersSchema, OpenAIFunctionToolSchema, ToolResponse

WHOLE = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search.",
        "parameters": {
            "type": "object",
            "properties": {
                "query_list": {"type": "array", "description": "queries", "items": {"type": "string"}, "minItems": 1},
                "mode": {"type": "string", "enum": ["a", "b"]},
                "either": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/deep"}]},
            },
            "required": ["query_list"],
            "$defs": {"deep": {"type": "object"}},
        },
        "strict": False,
    },
}


def test_a_schema_comes_back_as_it_was_given():
    schema = OpenAIFunctionToolSchema.model_validate(WHOLE)
    assert schema.model_dump(exclude_unset=True, exclude_none=True) == WHOLE
    assert list(schema.model_dump()) == ["type", "function"]
    assert schema.function.parameters.properties["mode"].enum == ["a", "b"]
    assert OpenAIFunctionToolSchema.model_validate(schema) is schema


def test_what_was_not_given_is_not_told():
    schema = OpenAIFunctionToolSchema(type="function", function={"name": "f"})  # type: ignore[arg-type]
    parameters = {"type": "object", "properties": {}}
    assert schema.model_dump() == {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"type": "function"}, r"^OpenAIFunctionToolSchema: .*'function'\. .*\btype\b"),
        ({"function": {"description": "d"}}, r"^OpenAIFunctionSchema: .*'name'\. .*\bdescription\b"),
        ({"function": {"name": ""}}, "^function.name: ''"),
        ({"function": {"name": "f", "parameters": {"type": "array"}}}, "parameters.type: 'array'"),
        ({"function": {"name": "f", "parameters": {"properties": ["a"]}}}, r"^parameters.properties: .*\['a'\]"),
        ("f", "^OpenAIFunctionToolSchema: .*str 'f'"),
    ],
)
def test_a_schema_that_says_too_little_is_refused(value: object, words: str):
    with pytest.raises(ValueError, match=words):
        OpenAIFunctionToolSchema.model_validate(value)


def test_a_tool_without_a_schema_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"tool_schema"):
        BaseTool({})


def test_a_tool_knows_its_name_config_and_schema():
    tool = BaseTool({"a": 1}, OpenAIFunctionToolSchema.model_validate(WHOLE))
    assert (tool.name, tool.config) == ("search", {"a": 1})
    assert tool.get_openai_tool_schema() is tool.tool_schema
    assert OpenAIFunctionParametersSchema().type == "object"
    assert ToolResponse().is_empty()


@function_tool
def bare(a: int) -> str:
    """One."""
    return str(a)


@function_tool("renamed")
def named(a: int) -> str:
    return str(a)


@function_tool(schema=WHOLE)
def described(query_list, mode="a"):
    return mode


def test_the_decorator_is_bare_or_takes_a_name_or_a_schema():
    assert bare(3) == "3"
    assert FunctionTool(bare).tool_schema.function.description == "One."
    assert FunctionTool(named).name == "renamed"
    assert FunctionTool(described).tool_schema.model_dump() == WHOLE


def test_the_tools_of_a_module_are_its_marked_functions_each_once():
    module = ModuleType("mine")
    vars(module).update(named=named, bare=bare, alias=bare, test=Mock(), helper=len)
    assert [tool.name for tool in marked_functions(module)] == ["renamed", "bare"]
