"""Tokens of what tools and simulated users reply: limited in length, long ones in killable processes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from verl.agent.chat import Chat
from verl.agent.chat_writer import ChatWriter, suffix_ids
from verl.utils.text_workers import SHORT_TEXT, TextWorkers, max_characters, text_length, tokenizer_loader

__all__ = ["reply_tokens"]

_SECONDS = 60.0

_workers: WeakKeyDictionary[asyncio.AbstractEventLoop, TextWorkers] = WeakKeyDictionary()


async def reply_tokens(
    chat: Chat, writer: ChatWriter, tokenizer: Any, messages: Sequence[dict[str, Any]], answer: Sequence[int], room: int
) -> list[int]:
    """`chat.suffix(messages, answer)`, of which the first `room` tokens count: texts are cut to what can fill them.

    TextWorkLimit, a ValueError, where it takes longer than 60 s or 2 GB: the trajectory fails, and no other.
    """
    limited = [_limited(message, max_characters(tokenizer, room)) for message in messages]
    if text_length(limited) <= SHORT_TEXT:
        return chat.suffix(limited, answer)
    loop = asyncio.get_running_loop()
    if loop not in _workers:
        _workers[loop] = TextWorkers(tokenizer_loader(tokenizer), _SECONDS)
    return await _workers[loop].call(suffix_ids, writer, limited, list(answer[-1:]))


def _limited(message: dict[str, Any], characters: int) -> dict[str, Any]:
    content = message["content"]
    if not isinstance(content, str) or len(content) <= characters:
        return message
    return {**message, "content": content[:characters]}
