"""What a tool tells of itself (an OpenAI function schema) and what it answers.

Schemas are made of dicts with `model_validate` and give them back with `model_dump`. Keys of JSON Schema that have no
field here (items, anyOf, $defs, …) are kept in `extra` and come back.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

S = TypeVar("S", bound="Schema")


@dataclass
class ToolResponse:
    """What a tool answers. The model reads the text."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        return not (self.text or self.image or self.video)


class Schema:
    """Base of the pieces below: from dicts and to dicts."""

    parts: ClassVar[dict[str, type[Schema]]] = {}
    """Fields that hold schemas themselves."""
    extra: dict[str, Any]

    @classmethod
    def model_validate(cls: type[S], value: Any) -> S:
        """The schema of a dict (or the schema itself); a ValueError says what is wrong with it."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"{cls.__name__}: expected a mapping, found {type(value).__name__} {value!r}.")
        names = {each.name for each in fields(cls)} - {"extra"}  # type: ignore[arg-type]
        known = {str(key): deepcopy(item) for key, item in value.items() if key in names}
        extra = {str(key): deepcopy(item) for key, item in value.items() if key not in names}
        try:
            return cls(**known, extra=extra)  # type: ignore[call-arg]
        except TypeError as error:
            raise ValueError(f"{cls.__name__}: {str(error).partition(' ')[2]}. Found: {', '.join(value)}.") from error

    def model_dump(self, *, exclude_none: bool = True, exclude_unset: bool = True, **_: Any) -> dict[str, Any]:
        """The dict that it stands for. Fields without a value are left out, whichever way that is asked for."""
        names = [each.name for each in fields(self) if each.name != "extra"]  # type: ignore[arg-type]
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {name: _plain(value) for name, value in {**given, **self.extra}.items()}

    def __post_init__(self) -> None:
        for name, kind in self.parts.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                setattr(self, name, kind.model_validate(value))


@dataclass
class OpenAIFunctionPropertySchema(Schema):
    """One parameter: a piece of JSON Schema."""

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class OpenAIFunctionParametersSchema(Schema):
    """All parameters: a JSON Schema of an object."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = field(default_factory=dict)
    required: list[str] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.type != "object":
            raise ValueError(f"parameters.type: {self.type!r}. Arguments have names, so it must be object.")
        if not isinstance(self.properties, Mapping):
            raise ValueError(f"parameters.properties: expected a mapping from names, found {self.properties!r}.")
        self.properties = {
            name: OpenAIFunctionPropertySchema.model_validate(value) for name, value in self.properties.items()
        }


@dataclass
class OpenAIFunctionSchema(Schema):
    """A function: its name, what it is for and what it takes."""

    parts: ClassVar = {"parameters": OpenAIFunctionParametersSchema}

    name: str
    description: str | None = None
    parameters: OpenAIFunctionParametersSchema = field(default_factory=OpenAIFunctionParametersSchema)
    strict: bool | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"function.name: {self.name!r} is not a name.")
        Schema.__post_init__(self)


@dataclass
class OpenAIFunctionToolSchema(Schema):
    """A tool as chat templates and the OpenAI API know it."""

    parts: ClassVar = {"function": OpenAIFunctionSchema}

    function: OpenAIFunctionSchema
    type: str = "function"
    extra: dict[str, Any] = field(default_factory=dict)

    def model_dump(self, *, exclude_none: bool = True, exclude_unset: bool = True, **_: Any) -> dict[str, Any]:
        return {"type": self.type, **super().model_dump()}


def _plain(value: Any) -> Any:
    if isinstance(value, Schema):
        return value.model_dump()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
