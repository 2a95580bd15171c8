"""Chat: a conversation as token ids, written by the model's chat template and extended turn by turn.

The tokens of a turn stay as the model sampled them. Only what follows a turn is rendered by the template and tokenised.
`check` compares this with the template applied to whole conversations, before anything is generated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl.agent.chat_check import check_template
from verl.utils.end_tokens import find_end_tokens
from verl.utils.turn_template import CallStyle, Messages, TurnTemplate, tool_message

__all__ = ["Chat", "tool_message"]

# Prefix for encoding a continuation: some tokenizers put a space before every text, but not inside of one.
_BEFORE = "!"


class Chat:
    """Conversations of one model with one set of tools."""

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] | None = None,
        end_token_ids: Iterable[int] = (),
        **template_kwargs: Any,
    ) -> None:
        """`tools` as the OpenAI API describes them; other keywords are those of the chat template.

        `end_token_ids` are the ids at which the engine ends a turn (`find_end_tokens` of the model). The end tokens
        of the tokenizer and the template are added to them.
        """
        self._tokenizer, self._tools, self._kwargs = tokenizer, list(tools or []) or None, template_kwargs
        if self.template is None:
            raise ValueError(
                "the tokenizer has no chat template, and turns need one. Take a model that has one (-Instruct, -it), or"
                " give one in data.apply_chat_template_kwargs.chat_template."
            )
        self.turns = TurnTemplate(tokenizer, self._tools, template_kwargs)
        self.style: CallStyle = self.turns.style
        template_ids = find_end_tokens(None, None, tokenizer, template_kwargs).turn_ids
        self.ends: frozenset[int] = template_ids | frozenset(end_token_ids)
        """Ids of the tokens that end a turn of the model."""

    def start(self, messages: Messages) -> list[int]:
        """The conversation up to the model's first turn."""
        return self.encode(self.write(messages, ask=True))

    def content(self, answer: Sequence[int]) -> list[int]:
        """The tokens of a turn without the token that ended it."""
        return list(answer[:-1] if answer and answer[-1] in self.ends else answer)

    def suffix(self, messages: Messages, answer: Sequence[int] = ()) -> list[int]:
        """The tokens after a turn of the model that these messages respond to, up to its next turn.

        `answer` are the tokens of that turn; only the last one matters. If it is one of `ends`, the template's end
        token is not written again; if it is the role token that opens the next message (GLM), the role token is not
        written again. After any other token the suffix begins with the template's end token.
        """
        turn_end = self.turns.after_turn(messages)
        rest, last = turn_end.rest, answer[-1] if answer else None
        if last is None or (last not in self.ends and last != self._token_id(turn_end.token)):
            return self.encode(turn_end.token + rest) if turn_end.token else self._encode_after_text(rest)
        if turn_end.role_token and last == self._token_id(turn_end.role_token):
            rest = rest.lstrip().removeprefix(turn_end.role_token)
        # Encoded together with the last token: some tokenizers strip white space after a special token.
        ids = self.encode(self._tokenizer.convert_ids_to_tokens(last) + rest)
        if ids[:1] == [last]:
            return ids[1:]
        return self.encode(turn_end.token + rest)[1:] if turn_end.token else self._encode_after_text(rest)

    def check(self, mode: str = "strict") -> list[str]:
        """Descriptions of what the template lacks and of the changes that it makes to earlier turns, for the log.

        Raises ValueError if tokens appended turn by turn differ from the template's tokens of the whole conversation.

        `mode`: ignore_strippable ignores differences in white space, disable checks nothing.
        """
        return [] if mode == "disable" else check_template(self, mode)

    def written_call(self) -> str | None:
        """How the template writes a call of the first tool (its argument is `of`); None: it writes none."""
        return self.turns.rendered_call()

    @property
    def tool_name(self) -> str:
        """The name of a tool to probe templates with."""
        return self.turns.tool_name

    def write(self, messages: Messages, ask: bool) -> str:
        """The template's text of a conversation; `ask`: with the generation prompt."""
        return self.turns.render(messages, generation_prompt=ask)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, including special tokens."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    @property
    def has_tools(self) -> bool:
        return self._tools is not None

    @property
    def template(self) -> Any:
        """The source of the template, or of several by name."""
        return self._kwargs.get("chat_template", self._tokenizer.chat_template)

    def _token_id(self, token: str) -> int | None:
        return int(self._tokenizer.convert_tokens_to_ids(token)) if token else None

    def _encode_after_text(self, text: str) -> list[int]:
        """Token ids of a text that follows other text: without a space that the tokenizer puts before every text."""
        before, both = self.encode(_BEFORE), self.encode(_BEFORE + text)
        return both[len(before) :] if both[: len(before)] == before else self.encode(text)
