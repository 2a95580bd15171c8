"""Parse, validate and tokenise requests of the gateway's clients: functions that run in the gateway's process for short
texts and in text workers for long ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.agent.chat import Chat, ChatSettings, cached_chat
from verl.agent.gateway.anthropic import as_openai
from verl.agent.gateway.tree import Message, prefix_digests, scope_key
from verl.inference.serving.api import ApiError
from verl.inference.serving.openai_requests import (
    HeavyRequest,
    ModelInfo,
    ParsedChatRequest,
    check_characters,
    check_grammar,
    contains_program,
    read_chat,
    template_errors,
)
from verl.utils.end_tokens import find_end_tokens
from verl.utils.http_server.json_body import parse_json

__all__ = ["MESSAGES", "GatewayRequest", "check_body", "end_ids", "prompt_ids", "read_request", "suffix_ids"]

MESSAGES = "/v1/messages"
# JSON encodes a character in up to six bytes (\u0020), and characters outside the basic plane as two of these.
_BYTES_PER_CHARACTER = 12
_BODY_SLACK = 2**20
_MAX_MODEL_NAME = 256


@dataclass(frozen=True)
class GatewayRequest:
    """A parsed and validated request."""

    chat: ParsedChatRequest
    parse_calls: bool
    """Whether tool calls are parsed from the response."""
    scope: str
    digests: list[str]
    """`prefix_digests` of the messages."""


def check_body(body: bytes | bytearray, model_info: ModelInfo) -> None:
    """Raise ApiError (413) for a body that cannot be a conversation within the model's context."""
    max_bytes = model_info.max_characters * _BYTES_PER_CHARACTER + _BODY_SLACK
    if len(body) > max_bytes:
        raise ApiError(
            f"the body has {len(body)} bytes; with a context of {model_info.max_model_len} tokens at most {max_bytes}"
            " are accepted. Shorten it.",
            "messages",
            status=413,
            code="context_length_exceeded",
        )


def read_request(
    tokenizer: Any,
    api: str,
    body: bytes | bytearray,
    model_info: ModelInfo,
    forces_calls: bool,
    grammars: bool,
    heavy: bool = True,
) -> GatewayRequest:
    """The request in a body sent to `api`; ApiError if it is refused. Without `heavy`, HeavyRequest for a grammar.

    With tool_choice=none the tools stay in the context, so that it matches earlier turns. Any model name is accepted:
    agents send the name of the model that they were written for. `forces_calls`: whether a response can be forced to
    begin with a call in the model's format. `grammars`: whether the engine supports grammars.
    """
    fields = parse_json(body)
    if not isinstance(fields, dict):
        raise ApiError("the body is not a JSON object.")
    fields = as_openai(fields) if api == MESSAGES else fields
    if not heavy and contains_program(fields):
        raise HeavyRequest
    name = fields.get("model") or model_info.names[0]
    if not isinstance(name, str) or len(name) > _MAX_MODEL_NAME:
        raise ApiError(f"model: should be a text of at most {_MAX_MODEL_NAME} characters.", "model")
    if fields.get("n", 1) not in (1, None):
        raise ApiError(f"n: {str(fields['n'])[:200]} is not supported by the gateway: a turn has one response.", "n")
    no_calls = fields.get("tool_choice") == "none"
    fields = {key: value for key, value in fields.items() if not (no_calls and key == "tool_choice")}
    chat = read_chat({**fields, "model": model_info.names[0]}, model_info, tokenizer)
    if chat.generation.forced_prefix and not forces_calls:
        raise ApiError("tool_choice: only auto and none are supported for this model's format of calls.", "tool_choice")
    if grammars:
        check_grammar(chat.generation, tokenizer)
    chat = replace(chat, generation=replace(chat.generation, model=name))
    scope = scope_key(chat.tools, chat.options)
    return GatewayRequest(chat, bool(chat.tools) and not no_calls, scope, prefix_digests(scope, chat.messages))


def prompt_ids(
    tokenizer: Any, settings: ChatSettings, messages: Sequence[Message], forced_prefix: str, model_info: ModelInfo
) -> list[int]:
    """Token ids of a conversation with the generation prompt and `forced_prefix`, the forced beginning of the response.

    ApiError if it does not fit the context or the template rejects it."""
    with template_errors():
        chat = cached_chat(tokenizer, settings)
        text = chat.render(messages, generation_prompt=True)
    check_characters(len(text), model_info, "messages")
    with template_errors():
        return chat.encode(text) + _encode_forced_prefix(chat, forced_prefix)


def suffix_ids(
    tokenizer: Any,
    settings: ChatSettings,
    messages: Sequence[Message],
    last_token: Sequence[int],
    forced_prefix: str,
    model_info: ModelInfo,
) -> list[int]:
    """Token ids of the messages after a response (`last_token`: its last token id). Otherwise like `prompt_ids`."""
    check_characters(sum(len(str(message["content"])) for message in messages), model_info, "messages")
    with template_errors():
        chat = cached_chat(tokenizer, settings)
        return chat.suffix(messages, last_token) + _encode_forced_prefix(chat, forced_prefix)


def end_ids(tokenizer: Any, template_kwargs: dict[str, Any]) -> frozenset[int]:
    """Ids of the tokens that end a turn in the chat template."""
    with template_errors():
        return find_end_tokens(None, None, tokenizer, template_kwargs).turn_ids


def _encode_forced_prefix(chat: Chat, forced_prefix: str) -> list[int]:
    return chat.encode(forced_prefix) if forced_prefix else []
