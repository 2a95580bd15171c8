"""Conversations to tokens: the prompt a model continues, and which tokens of a conversation are its own words."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]
# Messages -> the prompt's text, or its token ids.
ChatTemplate = Callable[[Messages], "str | list[int]"]


def as_messages(value: str | Sequence[Mapping[str, Any]]) -> Messages:
    """A prompt as messages: text is what the user says; fields that a columnar file filled with null are dropped."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return [{name: item for name, item in message.items() if item is not None} for message in value]


class PromptEncoder:
    """Turns prompts into token ids by the tokenizer's chat template, or by a function of the user."""

    def __init__(
        self, tokenizer: Any, template_kwargs: Mapping[str, Any], chat_template_func: ChatTemplate | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._kwargs = dict(template_kwargs)
        self._own_template = chat_template_func
        if chat_template_func is None and not tokenizer.chat_template:
            logger.warning("the tokenizer has no chat template: prompts are the plain text of their messages")

    def encode(self, prompts: Sequence[Messages]) -> list[list[int]]:
        """Token ids of each prompt, ready to be continued by the model; many at once is much faster."""
        if self._own_template is not None:
            made = [self._own_template(messages) for messages in prompts]
        elif self.tokenizer.chat_template:
            made = [self.render(messages, generation_prompt=True) for messages in prompts]
        else:
            texts = ["\n".join(str(message["content"]) for message in messages) for messages in prompts]
            return self.tokenizer(texts)["input_ids"] if texts else []
        texts = [item for item in made if isinstance(item, str)]
        # The template has already written the special tokens it wants.
        ids = iter(self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
        return [next(ids) if isinstance(item, str) else list(item) for item in made]

    def render(self, messages: Messages, generation_prompt: bool) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation_prompt, **self._kwargs
        )

    def encode_conversation(self, messages: Messages, last_turn_only: bool) -> tuple[list[int], list[int]]:
        """Token ids and, of the same length, 1 on what the assistant says up to and including its end token.

        The text is cut where each answer begins and ends and the pieces are tokenised on their own, as in generation:
        the model is trained on the very prompt tokens it will see.
        """
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise ValueError("the conversation has no message of the assistant to learn from. Add one.")
        trained = turns[-1:] if last_turn_only else turns
        pieces = self._pieces(messages, trained)
        encoded = self.tokenizer([text for text, _ in pieces], add_special_tokens=False)["input_ids"]
        ids: list[int] = []
        mask: list[int] = []
        for piece, (_, learn) in zip(encoded, pieces, strict=True):
            words = self._end_of_answer(piece) if learn else 0
            ids += piece
            mask += [1] * words + [0] * (len(piece) - words)
        return ids, mask

    def _pieces(self, messages: Messages, trained: Sequence[int]) -> list[tuple[str, bool]]:
        """The conversation's text in order, cut into (text, whether it is an answer to learn)."""
        if not self.tokenizer.chat_template:
            end = self.tokenizer.eos_token or ""
            return [
                (str(message["content"]) + (end if number in trained else "\n"), number in trained)
                for number, message in enumerate(messages)
            ]
        pieces, done = [], ""
        for turn in trained:
            before = self.render(messages[:turn], generation_prompt=True)
            after = self.render(messages[: turn + 1], generation_prompt=False)
            if not (before.startswith(done) and after.startswith(before)):
                raise ValueError(
                    f"the chat template changes what was said before message {turn}, so its text cannot be told from "
                    "the rest. Give one row per answer, with the conversation up to it."
                )
            pieces += [(before[len(done) :], False), (after[len(before) :], True)]
            done = after
        return [piece for piece in pieces if piece[0]]

    def _end_of_answer(self, ids: list[int]) -> int:
        """How many tokens the model would have sampled itself: templates may add a line break after the end token."""
        end = self.tokenizer.eos_token_id
        return len(ids) - ids[::-1].index(end) if end in ids else len(ids)
