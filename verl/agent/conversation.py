"""Derive the messages of a row from its tokens, for reward models with their own chat template.

Used for agent loops that do not return `AgentLoopOutput.messages`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.types.trajectory import Row

__all__ = ["conversation_of"]

Messages = Sequence[Mapping[str, Any]]


def conversation_of(
    row: Row, prompts: Mapping[tuple[int, ...], Messages], templated: Mapping[tuple[int, ...], Messages], tokenizer: Any
) -> list[dict[str, Any]]:
    """The messages of a row up to the model's last answer.

    `prompts` and `templated` map token ids to messages: of the data's prompts, and of calls of the loop's
    `apply_chat_template`. An unknown prompt becomes one user message; replies with unknown tokens become part of the
    surrounding answer.
    """

    def text(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))

    start = tuple(int(token) for token in row.prompt_ids)
    prompt = {**templated, **prompts}.get(start, [{"role": "user", "content": text(start)}])
    messages = [dict(message) for message in prompt]
    last = max((index for index, turn in enumerate(row.turns) if turn.source == "model"), default=-1)
    answer: list[int] = []
    for turn in row.turns[: last + 1]:
        token_ids = tuple(int(token) for token in turn.token_ids)
        replies = None if turn.source == "model" else templated.get(token_ids)
        if replies is None:
            answer += token_ids
        else:
            messages += [{"role": "assistant", "content": text(answer)}, *(dict(reply) for reply in replies)]
            answer = []
    return [*messages, {"role": "assistant", "content": text(answer)}]
