"""Requests of the Anthropic API: their models, and the same requests in terms of the OpenAI API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError

from verl.inference.serving.api_errors import ApiError
from verl.utils.http_server.json_body import RequestModel

__all__ = ["MessagesRequest", "as_openai"]

_MAX_SHOWN = 200
_SAME = {"max_tokens", "model", "stream", "temperature", "top_k", "top_p"}
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def _blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class _Lenient(RequestModel):
    """Fields such as cache_control and citations are ignored: nothing is cached or cited."""

    model_config = ConfigDict(extra="ignore")


class TextBlock(_Lenient):
    type: Literal["text"]
    text: str


class ToolUseBlock(_Lenient):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field(default_factory=dict)


class ToolResultBlock(_Lenient):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[TextBlock], BeforeValidator(_blocks)] = Field(default_factory=list)


class UserMessage(_Lenient):
    role: Literal["user"]
    content: Annotated[
        list[Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]],
        Field(min_length=1),
        BeforeValidator(_blocks),
    ]

    def as_openai(self) -> list[dict[str, Any]]:
        """Tool results become messages of their own; adjacent texts become one message."""
        messages: list[dict[str, Any]] = []
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                text = "\n".join(part.text for part in block.content)
                messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
            elif messages and messages[-1]["role"] == "user":
                messages[-1]["content"].append(block.text)
            else:
                messages.append({"role": "user", "content": [block.text]})
        return [
            {**message, "content": "".join(message["content"])} if message["role"] == "user" else message
            for message in messages
        ]


class AssistantMessage(_Lenient):
    role: Literal["assistant"]
    content: Annotated[list[Annotated[TextBlock | ToolUseBlock, Field(discriminator="type")]], BeforeValidator(_blocks)]

    def as_openai(self) -> list[dict[str, Any]]:
        """Texts and tool calls are one message."""
        text = "".join(block.text for block in self.content if isinstance(block, TextBlock))
        message: dict[str, Any] = {"role": "assistant", "content": text}
        calls = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
            for block in self.content
            if isinstance(block, ToolUseBlock)
        ]
        return [{**message, "tool_calls": calls} if calls else message]


class Tool(_Lenient):
    type: Literal["custom"] = "custom"
    name: str
    description: str = ""
    input_schema: dict[str, Any] = Field(default_factory=lambda: {"type": "object"})

    def as_openai(self) -> dict[str, Any]:
        described = {"description": self.description} if self.description else {}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.input_schema}}


class ToolChoice(_Lenient):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None

    def as_openai(self) -> Any:
        if self.type != "tool":
            return _TOOL_CHOICES[self.type]
        if self.name is None:
            raise ApiError("tool_choice.name: Field required.", "tool_choice")
        return {"type": "function", "function": {"name": self.name}}


class MessagesRequest(RequestModel):
    """`POST /v1/messages`. Bounds of numbers are checked with the OpenAI request that this one becomes."""

    model: str | None = None
    max_tokens: int
    messages: Annotated[
        list[Annotated[UserMessage | AssistantMessage, Field(discriminator="role")]], Field(min_length=1)
    ]
    system: Annotated[list[TextBlock], BeforeValidator(_blocks)] = Field(default_factory=list)
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    # Accepted without effect: the chat template decides how a model thinks; nothing is cached or billed.
    cache_control: Any = None
    context_management: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    metadata: Any = None
    output_config: Any = None
    service_tier: Any = None
    speed: Any = None
    thinking: Any = None


def as_openai(content: Any) -> dict[str, Any]:
    """Validate the JSON of an Anthropic request and return the same request for the OpenAI API."""
    request = _validated(content)
    body = request.model_dump(include=_SAME, exclude_none=True)
    system = "\n".join(block.text for block in request.system)
    body["messages"] = [{"role": "system", "content": system}] if system else []
    for message in request.messages:
        body["messages"] += message.as_openai()
    if body["messages"][-1]["role"] == "assistant":
        raise ApiError("messages: the last message must be the user's; responses are not continued.", "messages")
    if request.stop_sequences is not None:
        body["stop"] = request.stop_sequences
    if request.tools is not None:
        body["tools"] = [tool.as_openai() for tool in request.tools]
    if request.tool_choice is not None:
        body["tool_choice"] = request.tool_choice.as_openai()
    return body


def _validated(content: Any) -> MessagesRequest:
    try:
        return MessagesRequest.model_validate(content)
    except ValidationError as error:
        # The API words its errors like this: "messages.0.content: Field required".
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, problem["loc"]))[:_MAX_SHOWN]
        raise ApiError(f"{place}: {problem['msg'][:_MAX_SHOWN]}.".removeprefix(": "), place or None) from error
