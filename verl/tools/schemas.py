"""The OpenAI function schema of a tool, and ToolResponse, the result of a call.

Schemas are created from dicts with `model_validate` and converted back with `model_dump`. Keys of JSON Schema without a
field here (items, anyOf, $defs, …) are kept in `extra`.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

S = TypeVar("S", bound="Schema")


@dataclass
class ToolResponse:
    """The result of a tool call. The model reads the text."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        return not (self.text or self.image or self.video)


class Schema:
    """Base of the schemas below, with conversion from and to dicts."""

    parts: ClassVar[dict[str, type[Schema]]] = {}
    """Fields whose values are schemas."""
    extra: dict[str, Any]

    @classmethod
    def model_validate(cls: type[S], value: Any) -> S:
        """Create the schema from a dict; a schema is returned unchanged. ValueError if the dict is invalid."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"{cls.__name__}: expected a mapping, found {type(value).__name__} {value!r}.")
        names = {item.name for item in fields(cls)} - {"extra"}  # type: ignore[arg-type]
        known = {str(key): deepcopy(item) for key, item in value.items() if key in names}
        extra = {str(key): deepcopy(item) for key, item in value.items() if key not in names}
        try:
            return cls(**known, extra=extra)  # type: ignore[call-arg]
        except TypeError as error:
            raise ValueError(f"{cls.__name__}: {str(error).partition(' ')[2]}. Found: {', '.join(value)}.") from error

    def model_dump(self, *, exclude_none: bool = True, exclude_unset: bool = True, **_: Any) -> dict[str, Any]:
        """Convert to a dict. Fields without a value are always left out."""
        names = [item.name for item in fields(self) if item.name != "extra"]  # type: ignore[arg-type]
        values = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {name: _plain(value) for name, value in {**values, **self.extra}.items()}

    def __post_init__(self) -> None:
        for name, kind in self.parts.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                setattr(self, name, kind.model_validate(value))


@dataclass
class OpenAIFunctionPropertySchema(Schema):
    """JSON Schema of one parameter."""

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class OpenAIFunctionParametersSchema(Schema):
    """JSON Schema of all parameters: an object."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = field(default_factory=dict)
    required: list[str] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.type != "object":
            raise ValueError(f"parameters.type: {self.type!r} is not allowed. Arguments are named: use object.")
        if not isinstance(self.properties, Mapping):
            raise ValueError(f"parameters.properties: expected a mapping from names, found {self.properties!r}.")
        self.properties = {
            name: OpenAIFunctionPropertySchema.model_validate(value) for name, value in self.properties.items()
        }


@dataclass
class OpenAIFunctionSchema(Schema):
    """A function: name, description and parameters."""

    parts: ClassVar = {"parameters": OpenAIFunctionParametersSchema}

    name: str
    description: str | None = None
    parameters: OpenAIFunctionParametersSchema = field(default_factory=OpenAIFunctionParametersSchema)
    strict: bool | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"function.name: {self.name!r} is not a non-empty string.")
        Schema.__post_init__(self)


@dataclass
class OpenAIFunctionToolSchema(Schema):
    """A tool in the format of chat templates and the OpenAI API."""

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
