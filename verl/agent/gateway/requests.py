"""Requests of the gateway's clients, from the body to a checked conversation. Pure functions: they run in this process
for short bodies and in text workers for long ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from verl.agent.gateway.anthropic_requests import as_openai
from verl.agent.gateway.tree import digests_of, scope_of
from verl.inference.serving.api_errors import ApiError
from verl.inference.serving.openai_requests import (
    ChatAsk,
    HeavyRequest,
    ModelFacts,
    brings_program,
    check_grammar,
    read_chat,
)
from verl.utils.http_server.json_body import parse_json

__all__ = ["MESSAGES", "GatewayRequest", "check_body", "read_request"]

MESSAGES = "/v1/messages"
# JSON writes a character in up to six bytes (\u0020), two of these where it is outside of the first plane.
_BYTES_PER_CHARACTER = 12
_BODY_SLACK = 2**20
_MAX_MODEL_NAME = 256


@dataclass(frozen=True)
class GatewayRequest:
    """A request that was read."""

    chat: ChatAsk
    reads_calls: bool
    """Whether tool calls are parsed from the answer."""
    scope: str
    digests: list[str]
    """As of `Tree.lookup`."""


def check_body(body: bytes | bytearray, facts: ModelFacts) -> None:
    """Raise ApiError (413) for a body that cannot be a conversation within the model's context."""
    most = facts.max_characters * _BYTES_PER_CHARACTER + _BODY_SLACK
    if len(body) > most:
        raise ApiError(
            f"the body has {len(body)} bytes; with a context of {facts.max_model_len} tokens at most {most} are read."
            " Shorten it.",
            "messages",
            status=413,
            code="context_length_exceeded",
        )


def read_request(
    tokenizer: Any,
    api: str,
    body: bytes | bytearray,
    facts: ModelFacts,
    forces_calls: bool,
    grammars: bool,
    heavy: bool = True,
) -> GatewayRequest:
    """The request in a body sent to `api`; ApiError if it is refused. Without `heavy`, HeavyRequest for a grammar.

    Tools that may not be called now stay in the context: without them it would be another one. The model has many
    names: agents send the one of the model that they were written for. `forces_calls`: whether an answer can be made to
    begin with a call, in the model's format of calls. `grammars`: whether answers follow the grammar of a request.
    """
    fields = parse_json(body)
    if not isinstance(fields, dict):
        raise ApiError("the body is not a JSON object.")
    fields = as_openai(fields) if api == MESSAGES else fields
    if not heavy and brings_program(fields):
        raise HeavyRequest
    name = fields.get("model") or facts.names[0]
    if not isinstance(name, str) or len(name) > _MAX_MODEL_NAME:
        raise ApiError(f"model: should be a text of at most {_MAX_MODEL_NAME} characters.", "model")
    if fields.get("n", 1) not in (1, None):
        raise ApiError(f"n: {str(fields['n'])[:200]} is not supported by the gateway: a turn has one response.", "n")
    silent = fields.get("tool_choice") == "none"
    fields = {key: value for key, value in fields.items() if not (silent and key == "tool_choice")}
    chat = read_chat({**fields, "model": facts.names[0]}, facts, tokenizer)
    if chat.ask.begun and not forces_calls:
        raise ApiError("tool_choice: only auto and none are supported for this model's format of calls.", "tool_choice")
    if grammars:
        check_grammar(chat.ask, tokenizer)
    chat = replace(chat, ask=replace(chat.ask, model=name))
    scope = scope_of(chat.tools, chat.options)
    return GatewayRequest(chat, bool(chat.tools) and not silent, scope, digests_of(scope, chat.messages))
