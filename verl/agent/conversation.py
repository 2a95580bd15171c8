"""A row as a conversation, for a reward model that has its own chat template, where the loop does not give one."""

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

    `prompts` are the messages of known prompts, `templated` those that a loop's chat template wrote, both by their
    token ids. Another prompt is one user message. Replies that no template wrote are part of the answer around them.
    """

    def text(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))

    start = tuple(int(token) for token in row.prompt_ids)
    prompt = {**templated, **prompts}.get(start, [{"role": "user", "content": text(start)}])
    messages = [dict(message) for message in prompt]
    last = max((place for place, turn in enumerate(row.turns) if turn.source == "model"), default=-1)
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
