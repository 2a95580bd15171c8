"""ChatWriter: the settings of a Chat without its tokenizer, from which a text worker makes the same Chat."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from verl.agent.chat import Chat

__all__ = ["ChatWriter", "chat_of", "suffix_ids"]

# Chats that a process keeps.
_KEPT_CHATS = 64


class ChatWriter(NamedTuple):
    """Hashable, and small to send."""

    tools: str
    """As JSON, in the form of the OpenAI API."""
    end_token_ids: tuple[int, ...]
    template_kwargs: str
    """As JSON."""

    @classmethod
    def of(cls, tools: Any, end_token_ids: Iterable[int], template_kwargs: Mapping[str, Any]) -> ChatWriter:
        return cls(json.dumps(tools), tuple(sorted(end_token_ids)), json.dumps(dict(template_kwargs), sort_keys=True))


@lru_cache(_KEPT_CHATS)
def chat_of(tokenizer: Any, writer: ChatWriter) -> Chat:
    """The Chat with these settings."""
    return Chat(tokenizer, json.loads(writer.tools), writer.end_token_ids, **json.loads(writer.template_kwargs))


def suffix_ids(
    tokenizer: Any, writer: ChatWriter, messages: Sequence[Mapping[str, Any]], answer_end: Sequence[int]
) -> list[int]:
    """`Chat.suffix`, for text workers. `answer_end`: the last token of the answer."""
    return chat_of(tokenizer, writer).suffix(messages, answer_end)
