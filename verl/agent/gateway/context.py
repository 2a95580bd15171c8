"""Contexts of the gateway as token ids: functions that run in the gateway's process or in a text worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.agent.chat import Chat, ChatSettings, cached_chat
from verl.agent.gateway.tree import Message
from verl.inference.serving.openai_requests import ModelFacts, check_characters, template_errors
from verl.utils.end_tokens import find_end_tokens

__all__ = ["end_ids", "start_ids", "suffix_ids"]


def start_ids(
    tokenizer: Any, settings: ChatSettings, messages: Sequence[Message], begun: str, facts: ModelFacts
) -> list[int]:
    """Tokens of a whole conversation and of how the answer must begin. ApiError if it cannot fit, or is refused."""
    with template_errors():
        chat = cached_chat(tokenizer, settings)
        text = chat.render(messages, generation_prompt=True)
    check_characters(len(text), facts, "messages")
    with template_errors():
        return chat.encode(text) + _encoded(chat, begun)


def suffix_ids(
    tokenizer: Any,
    settings: ChatSettings,
    messages: Sequence[Message],
    answer_end: Sequence[int],
    begun: str,
    facts: ModelFacts,
) -> list[int]:
    """Tokens of the messages after an answer whose last token is in `answer_end`."""
    check_characters(sum(len(str(message["content"])) for message in messages), facts, "messages")
    with template_errors():
        chat = cached_chat(tokenizer, settings)
        return chat.suffix(messages, answer_end) + _encoded(chat, begun)


def end_ids(tokenizer: Any, template_kwargs: dict[str, Any]) -> frozenset[int]:
    """Tokens that end a turn in the chat template."""
    with template_errors():
        return find_end_tokens(None, None, tokenizer, template_kwargs).turn_ids


def _encoded(chat: Chat, begun: str) -> list[int]:
    return chat.encode(begun) if begun else []
