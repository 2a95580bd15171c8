"""Chat: a conversation as token ids, rendered by the model's chat template and extended turn by turn.

The tokens of the model's turns stay as sampled. Only the text after a turn is rendered by the template and tokenised.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from verl.utils.end_tokens import find_end_tokens
from verl.utils.tokenizer import SHORT_TEXT, TextWorkers, max_characters, text_length, tokenizer_loader
from verl.utils.turn_template import CallStyle, Messages, TurnTemplate, tool_message

__all__ = ["Chat", "ChatSettings", "cached_chat", "encode_replies", "tool_message"]

# Text that follows other text is encoded with this prefix: some tokenizers insert a space at the start of a text.
_PREFIX = "!"
# Size of the cache of Chats per process.
_CACHED_CHATS = 64
# Time limit for encoding long replies.
_ENCODE_TIMEOUT_S = 60.0

# Processes for encoding long replies, by event loop and tokenizer.
_text_workers: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, TextWorkers]] = WeakKeyDictionary()


class Chat:
    """Conversations of one model with one set of tools."""

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] | None = None,
        end_token_ids: Iterable[int] = (),
        **template_kwargs: Any,
    ) -> None:
        """`tools`: schemas in the format of the OpenAI API. `template_kwargs`: keywords of the chat template.

        `end_token_ids` are the ids at which the engine ends a turn (`find_end_tokens` of the model). The end tokens
        of the tokenizer and the template are added to them.
        """
        self._tokenizer, self._tools, self._template_kwargs = tokenizer, list(tools or []) or None, template_kwargs
        if self.template is None:
            raise ValueError(
                "the tokenizer has no chat template, which multi-turn conversations need. Use a model that has one"
                " (-Instruct, -it), or set data.apply_chat_template_kwargs.chat_template."
            )
        self.turns = TurnTemplate(tokenizer, self._tools, template_kwargs)
        self.style: CallStyle = self.turns.style
        template_ids = find_end_tokens(None, None, tokenizer, template_kwargs).turn_ids
        self.end_ids: frozenset[int] = template_ids | frozenset(end_token_ids)
        """Ids of the tokens that end a turn of the model."""

    def prompt_ids(self, messages: Messages) -> list[int]:
        """Return the token ids of the conversation with the generation prompt."""
        return self.encode(self.render(messages, generation_prompt=True))

    def strip_end_token(self, turn: Sequence[int]) -> list[int]:
        """Return the tokens of a turn without its end token, if it has one."""
        return list(turn[:-1] if turn and turn[-1] in self.end_ids else turn)

    def suffix(self, messages: Messages, turn: Sequence[int] = ()) -> list[int]:
        """Return the token ids to append to a turn of the model: the template's end token, the replies `messages`, and
        the generation prompt of the next turn.

        `turn`: the tokens of the model's turn; only the last one matters. If it is one of `end_ids`, the suffix does
        not begin with an end token. If it is the role token that opens the next message (GLM), the suffix begins after
        that token.
        """
        turn_end = self.turns.after_turn(messages)
        rest = turn_end.rest  # what the template writes after its end token
        last = turn[-1] if turn else None
        if last is None or (last not in self.end_ids and last != self._token_id(turn_end.token)):
            return self.encode(turn_end.token + rest) if turn_end.token else self._encode_after_text(rest)
        if turn_end.role_token and last == self._token_id(turn_end.role_token):
            rest = rest.lstrip().removeprefix(turn_end.role_token)
        # Encoded together with the last token: some tokenizers strip white space after a special token.
        ids = self.encode(self._tokenizer.convert_ids_to_tokens(last) + rest)
        if ids[:1] == [last]:
            return ids[1:]
        return self.encode(turn_end.token + rest)[1:] if turn_end.token else self._encode_after_text(rest)

    def render(self, messages: Messages, generation_prompt: bool) -> str:
        """Return the conversation as text."""
        return self.turns.render(messages, generation_prompt=generation_prompt)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens that the tokenizer would add."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, including special tokens."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    @property
    def has_tools(self) -> bool:
        return self._tools is not None

    @property
    def template(self) -> Any:
        """The Jinja source of the template, or a dict of templates by name; None if there is none."""
        return self._template_kwargs.get("chat_template", self._tokenizer.chat_template)

    def _token_id(self, token: str) -> int | None:
        return int(self._tokenizer.convert_tokens_to_ids(token)) if token else None

    def _encode_after_text(self, text: str) -> list[int]:
        """Return the token ids of a text that follows other text, without the space that the tokenizer would put
        first."""
        before, both = self.encode(_PREFIX), self.encode(_PREFIX + text)
        return both[len(before) :] if both[: len(before)] == before else self.encode(text)


class ChatSettings(NamedTuple):
    """The arguments of a Chat other than its tokenizer, to construct it again in a text worker process. Hashable."""

    tools: str
    """JSON, in the format of the OpenAI API."""
    end_token_ids: tuple[int, ...]
    template_kwargs: str
    """JSON."""

    @classmethod
    def create(cls, tools: Any, end_token_ids: Iterable[int], template_kwargs: Mapping[str, Any]) -> ChatSettings:
        return cls(json.dumps(tools), tuple(sorted(end_token_ids)), json.dumps(dict(template_kwargs), sort_keys=True))


@lru_cache(_CACHED_CHATS)
def cached_chat(tokenizer: Any, settings: ChatSettings) -> Chat:
    """Return the Chat with these settings, constructed once per process."""
    return Chat(tokenizer, json.loads(settings.tools), settings.end_token_ids, **json.loads(settings.template_kwargs))


async def encode_replies(
    chat: Chat,
    settings: ChatSettings,
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    turn: Sequence[int],
    max_tokens: int,
) -> list[int]:
    """Return `chat.suffix(messages, turn)`. Only its first `max_tokens` tokens are exact: each message is cut to the
    largest number of characters that `max_tokens` tokens can have.

    `settings` and `tokenizer` are those of `chat`. Long texts are encoded in a worker process. Raises TextWorkLimit, a
    ValueError, if that takes more than 60 s or 2 GB; only this trajectory fails.
    """
    shortened = [_shorten(message, max_characters(tokenizer, max_tokens)) for message in messages]
    if text_length(shortened) <= SHORT_TEXT:
        return chat.suffix(shortened, turn)
    loop = asyncio.get_running_loop()
    workers = _text_workers.setdefault(loop, {})
    if tokenizer not in workers:
        workers[tokenizer] = TextWorkers(tokenizer_loader(tokenizer), _ENCODE_TIMEOUT_S)
    return await workers[tokenizer].call(_encode_in_worker, settings, shortened, list(turn[-1:]))


def _encode_in_worker(
    tokenizer: Any, settings: ChatSettings, messages: Sequence[Mapping[str, Any]], last_token: Sequence[int]
) -> list[int]:
    return cached_chat(tokenizer, settings).suffix(messages, last_token)


def _shorten(message: dict[str, Any], characters: int) -> dict[str, Any]:
    content = message["content"]
    if not isinstance(content, str) or len(content) <= characters:
        return message
    return {**message, "content": content[:characters]}
