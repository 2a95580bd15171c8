"""The Anthropic API: request models, their conversion to OpenAI requests, and responses, events and errors."""

from __future__ import annotations

import json
import uuid
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError

from verl.agent.gateway.streamed_response import StreamedResponse
from verl.inference.serving.api import ApiError
from verl.inference.serving.openai_requests import ParsedRequest
from verl.inference.serving.openai_responses import ResponseChunk
from verl.utils.http_server.app import HttpError
from verl.utils.http_server.json_body import RequestModel

__all__ = ["AnthropicFormatter", "MessagesRequest", "anthropic_error", "as_openai"]

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_MAX_SHOWN = 200
_SHARED_FIELDS = {"max_tokens", "model", "stream", "temperature", "top_k", "top_p"}
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def _blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class _Lenient(RequestModel):
    """Base of models that ignore unknown fields, such as cache_control and citations: nothing is cached or cited."""

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
        """Tool results become separate messages; adjacent texts become one message."""
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


class AnthropicTool(_Lenient):
    type: Literal["custom"] = "custom"
    name: str
    description: str = ""
    input_schema: dict[str, Any] = Field(default_factory=lambda: {"type": "object"})

    def as_openai(self) -> dict[str, Any]:
        description = {"description": self.description} if self.description else {}
        return {"type": "function", "function": {"name": self.name, **description, "parameters": self.input_schema}}


class AnthropicToolChoice(_Lenient):
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
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
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
    body = request.model_dump(include=_SHARED_FIELDS, exclude_none=True)
    system = "\n".join(block.text for block in request.system)
    body["messages"] = [{"role": "system", "content": system}] if system else []
    for message in request.messages:
        body["messages"] += message.as_openai()
    if body["messages"][-1]["role"] == "assistant":
        raise ApiError(
            "messages: the last message must have the role user; prefilled responses are not supported.", "messages"
        )
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
        # The format of the API's errors: "messages.0.content: Field required".
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, problem["loc"]))[:_MAX_SHOWN]
        raise ApiError(f"{place}: {problem['msg'][:_MAX_SHOWN]}.".removeprefix(": "), place or None) from error


def anthropic_error(_path: str, error: HttpError) -> dict[str, Any]:
    """The `error_content` of the Anthropic API."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


class AnthropicFormatter:
    """Formats the response to one request, as one message or as events."""

    ping = 'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, parsed: ParsedRequest, response: StreamedResponse, tokenizer: Any) -> None:
        self._base = {
            "id": f"msg_{uuid.uuid4().hex[:24]}",
            "type": "message",
            "role": "assistant",
            "model": parsed.model,
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._response, self._prompt_tokens = response, sum(map(len, parsed.prompts))
        self._block_index, self._text_open = 0, False

    def whole(self, chunk: ResponseChunk) -> str:
        content = [{"type": "text", "text": chunk.text}] if chunk.text else []
        content += [_block(call, json.loads(call["function"]["arguments"])) for call in chunk.calls]
        usage = self._usage(len(self._response.output.token_ids))
        return json.dumps(
            {**self._base, "content": content, "usage": usage, **self._stop_fields(chunk)}, ensure_ascii=False
        )

    def begin(self) -> str:
        return _event("message_start", message={**self._base, "content": [], "usage": self._usage(0)})

    def chunk(self, chunk: ResponseChunk) -> str:
        events = ""
        if chunk.text:
            events += "" if self._text_open else self._open({"type": "text", "text": ""})
            self._text_open = True
            events += self._delta({"type": "text_delta", "text": chunk.text})
        if (chunk.calls or chunk.finish_reason) and self._text_open:
            events += self._close()
            self._text_open = False
        for call in chunk.calls:
            events += self._open(_block(call, {}))
            events += self._delta({"type": "input_json_delta", "partial_json": call["function"]["arguments"]})
            events += self._close()
        if chunk.finish_reason:
            usage = {"output_tokens": len(self._response.output.token_ids)}
            events += _event("message_delta", delta=self._stop_fields(chunk), usage=usage)
        return events

    def end(self) -> str:
        return _event("message_stop")

    def error(self, error: HttpError) -> str:
        return _event("error", error=anthropic_error("", error)["error"])

    def _open(self, block: dict[str, Any]) -> str:
        return _event("content_block_start", index=self._block_index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> str:
        return _event("content_block_delta", index=self._block_index, delta=delta)

    def _close(self) -> str:
        self._block_index += 1
        return _event("content_block_stop", index=self._block_index - 1)

    def _stop_fields(self, chunk: ResponseChunk) -> dict[str, Any]:
        stopped = self._response.stop_string if chunk.finish_reason == "stop" else None
        reason = "stop_sequence" if stopped else _STOP_REASONS[chunk.finish_reason or "stop"]
        return {"stop_reason": reason, "stop_sequence": stopped}

    def _usage(self, output_tokens: int) -> dict[str, int]:
        return {"input_tokens": self._prompt_tokens, "output_tokens": output_tokens}


def _block(call: dict[str, Any], arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments}


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields}, ensure_ascii=False)}\n\n"
