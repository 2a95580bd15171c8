"""Responses of the Anthropic API: messages, events and errors."""

from __future__ import annotations

import json
import uuid
from typing import Any

from verl.agent.gateway.answer import Answer
from verl.inference.serving.openai_replies import Part
from verl.inference.serving.openai_requests import Ask
from verl.utils.http_server.app import HttpError

__all__ = ["AnthropicReplies", "anthropic_error"]

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def anthropic_error(_path: str, error: HttpError) -> dict[str, Any]:
    """The `error_content` of the Anthropic API."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


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

    def error(self, error: HttpError) -> str:
        return _event("error", error=anthropic_error("", error)["error"])

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
