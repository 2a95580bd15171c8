"""Contexts of the gateway as token ids: functions that run in the gateway's process or in a text worker."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from verl.agent.chat import Chat
from verl.agent.gateway.tree import Message
from verl.inference.serving.openai_requests import ModelFacts, check_characters, template_errors

__all__ = ["ChatWriter", "start_ids", "suffix_ids"]

# Chats of a process, by their writer.
_KEPT_CHATS = 64


class ChatWriter(NamedTuple):
    """What a context is written with besides its messages; hashable and small to send."""

    scope: str
    """As of `tree.scope_of`: tools and options of the template."""
    end_token_ids: tuple[int, ...]
    template_kwargs: str
    """Options of the template that the operator sets, as JSON."""


def start_ids(
    tokenizer: Any, writer: ChatWriter, messages: Sequence[Message], begun: str, facts: ModelFacts
) -> list[int]:
    """Tokens of a whole conversation and of how the answer must begin. ApiError if it cannot fit, or is refused."""
    with template_errors():
        chat = _chat(tokenizer, writer)
        text = chat.write(messages, ask=True)
    check_characters(len(text), facts, "messages")
    with template_errors():
        return chat.encode(text) + _encoded(chat, begun)


def suffix_ids(
    tokenizer: Any,
    writer: ChatWriter,
    messages: Sequence[Message],
    answer_end: Sequence[int],
    begun: str,
    facts: ModelFacts,
) -> list[int]:
    """Tokens of the messages after an answer whose last token is in `answer_end`."""
    check_characters(sum(len(str(message["content"])) for message in messages), facts, "messages")
    with template_errors():
        chat = _chat(tokenizer, writer)
        return chat.suffix(messages, answer_end) + _encoded(chat, begun)


def _encoded(chat: Chat, begun: str) -> list[int]:
    return chat.encode(begun) if begun else []


@lru_cache(_KEPT_CHATS)
def _chat(tokenizer: Any, writer: ChatWriter) -> Chat:
    tools, options = json.loads(writer.scope)
    template_kwargs = {**json.loads(writer.template_kwargs), **options}
    return Chat(tokenizer, tools or None, writer.end_token_ids, **template_kwargs)
