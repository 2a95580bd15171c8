"""Request models of the OpenAI API and of the scoring API: the type and the bounds of every field."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from verl.inference.serving.api import ApiError
from verl.types.request import MAX_REPETITION_PENALTY, MAX_TEMPERATURE, MIN_REPETITION_PENALTY, MIN_TEMPERATURE
from verl.utils.http_server.app import HttpError
from verl.utils.http_server.json_body import RequestModel, parse_json

__all__ = [
    "ApiRequest",
    "ChatRequest",
    "CompletionRequest",
    "FunctionChoice",
    "GenerationRequest",
    "Message",
    "MessageToolCall",
    "ResponseFormat",
    "ScoreRequest",
    "as_inputs",
    "validate_request",
]

_INT64 = 2**63 - 1
_MAX_CHOICES = 128
_MAX_STOP_STRINGS = 16
# Every sampled token is compared with each stop string, over as many tokens as the string has bytes.
_MAX_STOP_CHARACTERS = 512
_MAX_TOP_LOG_PROBS = 20
_MAX_PROMPT_LOG_PROBS = 1024
_MAX_LIST = 2**18
_MAX_TOOLS = 1024
_MAX_NAME = 256
# Maximum characters of a value in error messages.
_SHOWN = 200
# Tags of unions; they are not part of the paths in error messages.
_TEXT, _LIST, _CHAT, _OBJECT, _TAG = "$text", "$list", "$chat", "$object", "$"

Request = TypeVar("Request", bound="ApiRequest")


# ---------------------------------------------------------------- types of fields


def _unsupported(*values: Any) -> AfterValidator:
    """Validator of an unsupported field: accepts only `values`, which have no effect."""

    def check(value: Any) -> Any:
        if any(type(value) is type(known) and value == known for known in values):
            return value
        raise ValueError("is not supported by this server. Leave it out")

    return AfterValidator(check)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _as_prompts(value: Any) -> Any:
    """One prompt (a text, token ids) or a list of prompts, as a list of prompts."""
    several = isinstance(value, list) and value and all(isinstance(item, str | list) for item in value)
    return value if several else [value]


def as_inputs(value: Any) -> Any:
    """One input (a text, token ids, a conversation) or a list of inputs, as a list of inputs."""
    if isinstance(value, list) and (not value or isinstance(value[0], str | list)):
        return value
    return [value]


def _kind(value: Any) -> str | None:
    """The tag of the member of a union that `value` belongs to, by its type."""
    kinds: dict[type, str] = {str: _TEXT, dict: _OBJECT, list: _LIST}
    return kinds.get(type(value))


def _input_kind(value: Any) -> str | None:
    return _CHAT if isinstance(value, list) and value and isinstance(value[0], dict) else _kind(value)


def _temperature(value: float) -> float:
    if 0 < value < MIN_TEMPERATURE:
        raise ValueError(f"should be 0 (greedy) or at least {MIN_TEMPERATURE:g}")
    return value


def _one_of(expected: str, kind: Callable[[Any], str | None] = _kind) -> Discriminator:
    return Discriminator(kind, custom_error_type="union", custom_error_message=f"should be {expected}")


Positive = Annotated[int, Field(ge=1, le=_INT64)]
NotNegative = Annotated[int, Field(ge=0, le=_INT64)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Name = Annotated[str, Field(min_length=1, max_length=_MAX_NAME)]
TokenIds = Annotated[list[NotNegative], Field(fail_fast=True)]
TokenIdSet = Annotated[list[NotNegative], Field(max_length=_MAX_LIST, fail_fast=True)]
Biases = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=_MAX_LIST),
]
StopString = Annotated[str, Field(min_length=1, max_length=_MAX_STOP_CHARACTERS)]
StopStrings = Annotated[list[StopString], Field(max_length=_MAX_STOP_STRINGS), BeforeValidator(_as_list)]
Prompt = Annotated[
    Annotated[str, Tag(_TEXT)] | Annotated[TokenIds, Tag(_LIST)],
    _one_of("a text, a list of token ids, or a list of either"),
]


class _Open(RequestModel):
    """Part of a request with fields that only chat templates read."""

    model_config = ConfigDict(extra="allow")


class FunctionName(_Open):
    name: Name


class FunctionChoice(_Open):
    """`tool_choice` that names a function."""

    type: Literal["function"] = "function"
    function: FunctionName


class Function(FunctionName):
    strict: bool = False
    parameters: dict[str, Any] = Field(default_factory=dict)


class Tool(_Open):
    type: Literal["function"] = "function"
    function: Function


class CalledFunction(FunctionName):
    arguments: Any = None

    @field_validator("arguments", mode="before")
    @classmethod
    def _parse(cls, arguments: Any) -> Any:
        """Chat templates read objects; clients send them as JSON in a string."""
        if not isinstance(arguments, str):
            return arguments
        try:
            return parse_json(arguments.encode() or b"{}")
        except HttpError as error:
            raise ValueError("is not valid JSON") from error


class MessageToolCall(_Open):
    type: Literal["function"] = "function"
    function: CalledFunction


class TextPart(_Open):
    text: str


Content = Annotated[
    Annotated[str, Tag(_TEXT)] | Annotated[list[TextPart], Field(fail_fast=True), Tag(_LIST)],
    _one_of("a text, or a list of parts of type text"),
]


class Message(_Open):
    """A message of a conversation."""

    role: Name
    content: Content | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=_MAX_TOOLS)] | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError("content should be a text")
        return self

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


Messages = Annotated[list[Message], Field(min_length=1, max_length=_MAX_LIST, fail_fast=True)]


Input = Annotated[
    Annotated[str, Tag(_TEXT)] | Annotated[TokenIds, Tag(_LIST)] | Annotated[Messages, Tag(_CHAT)],
    _one_of("a text, token ids, a conversation, or a list of these", _input_kind),
]
Inputs = Annotated[list[Input], Field(fail_fast=True), BeforeValidator(as_inputs)]


class JsonSchema(RequestModel):
    model_config = ConfigDict(extra="ignore")

    json_schema: dict[str, Any] = Field(alias="schema")


class ResponseFormat(RequestModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None


class StreamOptions(RequestModel):
    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


# ---------------------------------------------------------------- requests


class ApiRequest(RequestModel):
    """Fields of all requests."""

    model: str | None = None

    # Not supported.
    audio: Annotated[Any, _unsupported()] = None
    best_of: Annotated[Any, _unsupported(1)] = None
    function_call: Annotated[Any, _unsupported("none", "auto")] = None
    functions: Annotated[Any, _unsupported([])] = None
    modalities: Annotated[Any, _unsupported(["text"])] = None
    prediction: Annotated[Any, _unsupported()] = None
    reasoning_effort: Annotated[Any, _unsupported()] = None
    suffix: Annotated[Any, _unsupported("")] = None
    verbosity: Annotated[Any, _unsupported()] = None
    web_search_options: Annotated[Any, _unsupported()] = None

    # Without effect on the response.
    metadata: Any = None
    parallel_tool_calls: Any = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    user: Any = None


class GenerationRequest(ApiRequest):
    """Fields of completions and chat completions."""

    n: Annotated[int, Field(ge=1, le=_MAX_CHOICES)] = 1
    max_tokens: Positive | None = None
    min_tokens: NotNegative = 0
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE), AfterValidator(_temperature)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=_INT64)] = -1
    min_p: Share = 0.0
    seed: Annotated[int, Field(ge=-(2**63), le=_INT64)] | None = None
    stop: StopStrings = Field(default_factory=list)
    stop_token_ids: TokenIdSet = Field(default_factory=list)
    ignore_eos: bool = False
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] = 1.0
    logit_bias: Biases = Field(default_factory=dict)
    response_format: ResponseFormat = ResponseFormat()
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: Annotated[list[Prompt], Field(fail_fast=True), BeforeValidator(_as_prompts)]
    max_tokens: NotNegative | None = None
    """0 only with `echo`."""
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=_MAX_TOP_LOG_PROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=_MAX_PROMPT_LOG_PROBS)] | None = None


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: Positive | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=_MAX_TOP_LOG_PROBS)] = 0
    tools: Annotated[list[Tool], Field(max_length=_MAX_TOOLS, fail_fast=True)] = Field(default_factory=list)
    tool_choice: Annotated[
        Annotated[Literal["none", "auto", "required"], Tag(_TEXT)] | Annotated[FunctionChoice, Tag(_OBJECT)],
        _one_of("none, auto, required, or one of the tools"),
    ] = "auto"
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class ScoreRequest(ApiRequest):
    """`POST /v1/rewards` and `POST /classify`: either `input` or `messages`."""

    input: Inputs | None = None
    messages: Messages | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=_INT64)] | None = None


def validate_request(model: type[Request], fields: Any) -> Request:
    """Return the validated request; ApiError with the field at fault as `param`."""
    if not isinstance(fields, dict):
        raise ApiError("the body is not a JSON object.")
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        problems = error.errors(include_url=False)
    unknown = next((item for item in problems if item["type"] == "extra_forbidden" and len(item["loc"]) == 1), None)
    if unknown is not None:  # first: a missing field may be a misspelled one
        name = str(unknown["loc"][0])
        similar = difflib.get_close_matches(name[:_SHOWN], model.model_fields, n=1)
        hint = f" Did you mean {similar[0]}?" if similar else ""
        raise ApiError(f"Unrecognized request argument supplied: {name[:_SHOWN]}.{hint}", name[:_SHOWN])
    problem = problems[0]
    path = _path(problem["loc"])
    if problem["type"] == "missing":
        raise ApiError(f"{path}: is missing.", _param(problem["loc"]))
    shown = json.dumps(problem["input"], ensure_ascii=False, default=repr)
    shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "…"
    reason = "should be an object" if problem["type"] == "model_type" else problem["msg"]
    reason = reason.removeprefix("Value error, ").rstrip(".")
    raise ApiError(f"{path}: {reason} (got {shown}).", _param(problem["loc"]))


def _path(location: tuple[int | str, ...]) -> str:
    """The path of a value as clients write it: messages[0].content."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith(_TAG) and part != "[key]":
            path += f".{part[:_SHOWN]}" if path else part[:_SHOWN]
    return path


def _param(location: tuple[int | str, ...]) -> str:
    """The field at fault; for `messages` with the index of the message."""
    return _path(location[:2] if location[0] == "messages" else location[:1])
