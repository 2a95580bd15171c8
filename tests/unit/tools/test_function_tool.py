"""What a model is schema of a Python function, and what the function is given of the model's JSON."""

from __future__ import annotations

import enum
import typing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NewType, Optional, TypedDict, Union

import pytest

from verl.tools.function_tool import convert_value, function_schema, parse_docstring, type_schema


class Unit(enum.Enum):
    METRE = "m"
    FOOT = "ft"


@dataclass
class Point:
    x: float
    y: float = 0.0
    tags: list[str] = field(default_factory=list)


class Options(TypedDict, total=False):
    deep: bool


class Section(TypedDict):
    unit: Unit


UserId = NewType("UserId", int)
UserUnit = NewType("UserUnit", Unit)


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (str, {"type": "string"}),
        (bool, {"type": "boolean"}),
        (Any, {}),
        (Optional[int], {"type": "integer", "nullable": True}),  # noqa: UP045
        (int | None, {"type": "integer", "nullable": True}),
        (Union[int, str], {"anyOf": [{"type": "integer"}, {"type": "string"}]}),  # noqa: UP007
        (int | str | None, {"anyOf": [{"type": "integer"}, {"type": "string"}], "nullable": True}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Literal[1, "b"], {"enum": [1, "b"]}),
        (Literal["a", None], {"type": "string", "enum": ["a"], "nullable": True}),
        (Unit, {"type": "string", "enum": ["m", "ft"]}),
        (list, {"type": "array", "items": {}}),
        (list[list[int]], {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}),
        (set[str], {"type": "array", "items": {"type": "string"}, "uniqueItems": True}),
        (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
        (
            tuple[int, str],
            {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2, "maxItems": 2},
        ),
        (dict, {"type": "object"}),
        (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
        (Annotated[int, "how many"], {"type": "integer", "description": "how many"}),
        (UserId, {"type": "integer"}),
        (
            Point,
            {
                "type": "object",
                "properties": {
                    "x": {"type": "number"},
                    "y": {"type": "number"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["x"],
                "additionalProperties": False,
            },
        ),
        (
            Options,
            {
                "type": "object",
                "properties": {"deep": {"type": "boolean"}},
                "required": [],
                "additionalProperties": False,
            },
        ),
    ],
)
def test_a_type_hint_becomes_json_schema(hint: Any, schema: dict[str, Any]):
    assert type_schema(hint) == schema


@pytest.mark.parametrize(
    ("hint", "value", "expected"),
    [
        (int, 3.0, 3),
        (Unit, "ft", Unit.FOOT),
        (Point, {"x": 1.0, "tags": ["a"]}, Point(1.0, 0.0, ["a"])),
        (list[Unit], ["m"], [Unit.METRE]),
        (dict[str, Unit], {"a": "m"}, {"a": Unit.METRE}),
        (tuple[int, Unit], [1, "m"], (1, Unit.METRE)),
        (set[int], [1, 2], {1, 2}),
        (Optional[Point], {"x": 1.0}, Point(1.0)),  # noqa: UP045
        (Optional[Point], None, None),  # noqa: UP045
        (Annotated[Unit, "unit"], "m", Unit.METRE),
        (int | str, "3", "3"),
        (UserId, 3.0, 3),
        (list[UserUnit], ["m"], [Unit.METRE]),
        (Section, {"unit": "ft"}, {"unit": Unit.FOOT}),
    ],
)
def test_json_becomes_what_the_hint_asks_for(hint: Any, value: Any, expected: Any):
    assert convert_value(hint, value) == expected


@pytest.mark.skipif(not hasattr(typing, "NotRequired"), reason="Python 3.10")
def test_optional_fields_of_a_typed_dict_are_not_required():
    page = TypedDict("page", {"unit": Unit, "note": typing.NotRequired[int]})  # noqa: UP013
    schema = type_schema(page)
    assert schema["required"] == ["unit"]
    assert schema["properties"]["note"] == {"type": "integer"}
    assert convert_value(page, {"unit": "m", "note": 3.0}) == {"unit": Unit.METRE, "note": 3}


def test_the_docstring_of_a_function_describes_it_and_its_parameters():
    def convert(length: float, unit: Unit, note: Annotated[str, "said by the hint"] = "", *, agent_data: Any = None):
        """Convert a length.

        Rounds to millimetres.

        Args:
            length (float): the length: a number
                that may be negative.
            unit: its unit.
            note: said by the docstring.

        Returns:
            text: the length.
        """

    schema = function_schema(convert, "length")["function"]
    assert schema["name"] == "length"
    assert schema["description"] == "Convert a length.\n\nRounds to millimetres."
    assert schema["parameters"] == {
        "type": "object",
        "properties": {
            "length": {"type": "number", "description": "the length: a number that may be negative."},
            "unit": {"type": "string", "enum": ["m", "ft"], "description": "its unit."},
            "note": {"type": "string", "description": "said by the hint"},
        },
        "required": ["length", "unit"],
    }


def test_a_docstring_without_sections_is_the_description():
    assert parse_docstring("Adds.\nReally: adds.") == ("Adds.\nReally: adds.", {})


def no_hint(x): ...
def positional(*x: int) -> None: ...
def strange(x: complex) -> None: ...
def keys(x: dict[int, str]) -> None: ...
def lost(x: Nowhere) -> None: ...  # noqa: F821


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (no_hint, r"^no_hint\(x\): .*x: str"),
        (positional, r"^positional\(x\): .*keyword"),
        (strange, r"^strange\(x\): .*\bcomplex\b"),
        (keys, r"^keys\(x\): dict .*'int'"),
        (lost, r"^lost: .*'Nowhere'"),
    ],
)
def test_what_a_model_cannot_be_told_is_refused_with_the_parameter(function: Any, words: str):
    with pytest.raises(ValueError, match=words):
        function_schema(function)
