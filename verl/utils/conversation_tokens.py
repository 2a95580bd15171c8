"""ConversationTokens: whole conversations in the tokens of a model that scores them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.utils.dataset.chat import Messages
from verl.utils.dataset.conversation import ConversationEncoder, up_to_answer
from verl.utils.tool_messages import accepted_messages

SCORED_AT_END = "scored_at_end_token"
"""In a tokenizer's configuration: its model reads the score at the end token of the answer, not after what the template
writes behind it. So `verl.trainer.main_rm` trains."""
# A tokenizer that knows no limit of its model says some such number.
_NO_LIMIT = 10**9


class ConversationTokens:
    """Conversations, whose last message is the answer to be scored, as `tokenizer`'s chat template writes them.

    Without a template each is the pair (contents of the other messages, a line break between them; answer), as
    classifiers of question and answer are trained. What is longer than `longest` tokens (None: what the tokenizer says
    of its model) loses its beginning: what is scored is the answer. A tokenizer with `SCORED_AT_END` ends them there,
    and writes them as `main_rm` did, with a template or without.
    """

    def __init__(self, tokenizer: Any, longest: int | None = None) -> None:
        self._tokenizer = tokenizer
        limit = getattr(tokenizer, "model_max_length", None) or _NO_LIMIT
        self._longest = longest or (limit if limit < _NO_LIMIT else None)

    def encode(self, conversations: Sequence[Sequence[Any]]) -> list[list[int]]:
        """Token ids of each. ValueError: the template refuses one."""
        conversations = [accepted_messages(self._tokenizer, each) for each in conversations]
        at_end = self._tokenizer.init_kwargs.get(SCORED_AT_END)
        if not (at_end or getattr(self._tokenizer, "chat_template", None)):
            return self._pairs(conversations)
        if at_end:
            encoder = ConversationEncoder(self._tokenizer, {}, last_turn_only=True)
            encoded = [self._up_to_end(encoder, [dict(message) for message in each]) for each in conversations]
        else:
            # A template has already written the special tokens it wants.
            encoded = self._tokenizer(self._written(conversations), add_special_tokens=False)["input_ids"]
        return [ids if self._longest is None else ids[-self._longest :] for ids in encoded]

    def _up_to_end(self, encoder: ConversationEncoder, messages: Messages) -> list[int]:
        """What a policy says is scored, whatever it is: also what a template would not let it learn."""
        if messages[-1].get("role") != "assistant":
            raise ValueError(
                f"the last message is the {messages[-1].get('role')}'s, and the model scores what the assistant says"
            )
        try:
            return up_to_answer(encoder.rows(messages)[0])
        except ValueError:  # the template changes the answer: it is scored as written, or refused for good
            ids = self._tokenizer(self._written([messages]), add_special_tokens=False)["input_ids"][0]
            return ids[: encoder.until_end(ids)]

    def _pairs(self, conversations: Sequence[Sequence[Any]]) -> list[list[int]]:
        contents = [[str(message["content"]) for message in each] for each in conversations]
        encoded = self._tokenizer(["\n".join(each[:-1]) for each in contents], [each[-1] for each in contents])
        found = list(encoded["input_ids"])
        for row, ids in enumerate(found):
            excess = 0 if self._longest is None else len(ids) - self._longest
            if excess > 0:
                # Of the prompt first, then of the answer; special tokens (None) stay.
                owner = encoded.sequence_ids(row)
                words = [at for part in (0, 1) for at, whose in enumerate(owner) if whose == part]
                dropped = set(words[:excess])
                found[row] = [token for at, token in enumerate(ids) if at not in dropped]
        return found

    def _written(self, conversations: Sequence[Sequence[Any]]) -> list[str]:
        try:
            return self._tokenizer.apply_chat_template([list(each) for each in conversations], tokenize=False)
        except Exception as cause:  # a template is a program of the model's: it may raise anything
            roles = sorted({", ".join(str(message.get("role")) for message in each) for each in conversations})
            raise ValueError(
                f"its chat template refuses a conversation ({type(cause).__name__}: {cause}; roles:"
                f" {' | '.join(roles)})"
            ) from cause
