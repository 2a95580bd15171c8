"""The Anthropic API in terms of the OpenAI one: what its requests ask, and what its clients are told."""

from __future__ import annotations

import json
import uuid
from typing import Any

from verl.agent.gateway.answer import Answer
from verl.inference.serving.fields import ApiError
from verl.inference.serving.openai_replies import Part
from verl.inference.serving.openai_requests import Ask

__all__ = ["AnthropicReplies", "as_openai", "error_content"]

_SAME = ("max_tokens", "messages", "model", "stream", "temperature", "top_k", "top_p")
# Fields that change nothing in an answer here: how a model thinks is up to its template; nothing is cached or billed.
_WITHOUT_EFFECT = (
    "cache_control",
    "context_management",
    "diagnostics",
    "inference_geo",
    "metadata",
    "output_config",
    "service_tier",
    "speed",
    "thinking",
)
_OWN = ("stop_sequences", "system", "tool_choice", "tools")
_KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def as_openai(given: dict[str, Any]) -> dict[str, Any]:
    """The same request as the OpenAI API words it; its values are checked there."""
    given = {name: value for name, value in given.items() if value is not None}
    unknown = sorted(given.keys() - {*_SAME, *_OWN, *_WITHOUT_EFFECT})
    if unknown:
        raise ApiError(f"{unknown[0][:200]}: Extra inputs are not permitted.", unknown[0][:200])
    if "max_tokens" not in given:
        raise ApiError("max_tokens: Field required.", "max_tokens")
    asked = {name: given[name] for name in _SAME if name in given}
    asked["messages"] = [*_system(given.get("system", "")), *_messages(given.get("messages"))]
    if "stop_sequences" in given:
        asked["stop"] = given["stop_sequences"]
    if "tools" in given:
        asked["tools"] = [_tool(tool, f"tools.{number}") for number, tool in enumerate(_list(given["tools"], "tools"))]
    if "tool_choice" in given:
        asked["tool_choice"] = _tool_choice(given["tool_choice"])
    return asked


def error_content(error: ApiError) -> dict[str, Any]:
    """A refusal as this API words it."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


class AnthropicReplies:
    """The reply to one request as this API words it: whole, or as events."""

    ping = 'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, ask: Ask, answer: Answer, tokenizer: Any) -> None:
        self._base = {
            "id": f"msg_{uuid.uuid4().hex[:24]}",
            "type": "message",
            "role": "assistant",
            "model": ask.model,
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._answer, self._prompt_tokens = answer, sum(map(len, ask.prompts))
        self._blocks, self._text_open = 0, False

    def whole(self, part: Part) -> str:
        content = [{"type": "text", "text": part.text}] if part.text else []
        content += [_block(call, json.loads(call["function"]["arguments"])) for call in part.calls]
        usage = self._usage(len(self._answer.output.token_ids))
        return json.dumps({**self._base, "content": content, "usage": usage, **self._ending(part)}, ensure_ascii=False)

    def begin(self) -> str:
        return _event("message_start", message={**self._base, "content": [], "usage": self._usage(0)})

    def piece(self, part: Part) -> str:
        told = ""
        if part.text:
            told += "" if self._text_open else self._open({"type": "text", "text": ""})
            self._text_open = True
            told += self._delta({"type": "text_delta", "text": part.text})
        if (part.calls or part.finish_reason) and self._text_open:
            told += self._close()
            self._text_open = False
        for call in part.calls:
            told += self._open(_block(call, {}))
            told += self._delta({"type": "input_json_delta", "partial_json": call["function"]["arguments"]})
            told += self._close()
        if part.finish_reason:
            usage = {"output_tokens": len(self._answer.output.token_ids)}
            told += _event("message_delta", delta=self._ending(part), usage=usage)
        return told

    def end(self) -> str:
        return _event("message_stop")

    def error(self, error: ApiError) -> str:
        return _event("error", **{name: value for name, value in error_content(error).items() if name != "type"})

    def _open(self, block: dict[str, Any]) -> str:
        return _event("content_block_start", index=self._blocks, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> str:
        return _event("content_block_delta", index=self._blocks, delta=delta)

    def _close(self) -> str:
        self._blocks += 1
        return _event("content_block_stop", index=self._blocks - 1)

    def _ending(self, part: Part) -> dict[str, Any]:
        stopped = self._answer.stop_string if part.finish_reason == "stop" else None
        reason = "stop_sequence" if stopped else _REASONS[part.finish_reason or "stop"]
        return {"stop_reason": reason, "stop_sequence": stopped}

    def _usage(self, output_tokens: int) -> dict[str, int]:
        return {"input_tokens": self._prompt_tokens, "output_tokens": output_tokens}


def _block(call: dict[str, Any], arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments}


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields}, ensure_ascii=False)}\n\n"


# ---------------------------------------------------------------- requests


def _system(given: Any) -> list[dict[str, Any]]:
    text = given if isinstance(given, str) else "\n".join(_texts(given, "system"))
    return [{"role": "system", "content": text}] if text else []


def _messages(given: Any) -> list[dict[str, Any]]:
    made = []
    for number, message in enumerate(_list(given, "messages")):
        where = f"messages.{number}"
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
            raise ApiError(f"{where}: must be an object with a role (user or assistant) and a content.", where)
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else _list(content, f"{where}.content")
        made += (_assistant if message["role"] == "assistant" else _user)(blocks, f"{where}.content")
    if made and made[-1]["role"] == "assistant":
        raise ApiError("messages: the last one must be the user's; an answer that is begun is not gone on with.")
    return made


def _assistant(blocks: list[Any], where: str) -> list[dict[str, Any]]:
    """Text and calls are one message there and here."""
    calls = []
    for block in blocks:
        if isinstance(block, dict) and block.get("type") == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input", {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
    rest = [block for block in blocks if not (isinstance(block, dict) and block.get("type") == "tool_use")]
    message: dict[str, Any] = {"role": "assistant", "content": "".join(_texts(rest, where))}
    return [{**message, "tool_calls": calls} if calls else message]


def _user(blocks: list[Any], where: str) -> list[dict[str, Any]]:
    """Results of tools are messages of their own; texts that stand together are one."""
    made: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, dict) and block.get("type") == "tool_result":
            content = block.get("content", "")
            text = content if isinstance(content, str) else "\n".join(_texts(content, f"{where}.content"))
            made.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        else:
            text = "".join(_texts([block], where))
            if made and made[-1]["role"] == "user":
                made[-1]["content"] += text
            else:
                made.append({"role": "user", "content": text})
    return made


def _texts(blocks: Any, where: str) -> list[str]:
    texts = [block.get("text") if isinstance(block, dict) else None for block in _list(blocks, where)]
    if not all(isinstance(text, str) for text in texts):
        raise ApiError(f"{where}: only blocks of text and of tools are read.", where)
    return [text for text in texts if isinstance(text, str)]


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type", "custom") != "custom" or not isinstance(tool.get("name"), str):
        raise ApiError(f"{where}: must be an object with a name and an input_schema; tools of the API are none.", where)
    function = {name: tool[name] for name in ("name", "description") if name in tool}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema", {"type": "object"})}}


def _tool_choice(given: Any) -> Any:
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "tool":
        return {"type": "function", "function": {"name": given.get("name")}}
    choices = {"auto": "auto", "any": "required", "none": "none"}
    if kind not in choices:
        raise ApiError("tool_choice: must be an object whose type is auto, any, tool or none.", "tool_choice")
    return choices[kind]


def _list(given: Any, where: str) -> list[Any]:
    if not isinstance(given, list):
        raise ApiError(f"{where}: must be a list.", where)
    return given
