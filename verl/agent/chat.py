"""Chat: a conversation as token ids, rendered by the model's chat template and extended turn by turn.

The tokens of the model's turns stay as sampled. Only the text after a turn is rendered by the template and tokenised.
`check_template` compares the resulting tokens with those of the template applied to whole conversations, before
training.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from verl.utils.end_tokens import find_end_tokens
from verl.utils.tokenizer import SHORT_TEXT, TextWorkers, max_characters, text_length, tokenizer_loader
from verl.utils.turn_template import (
    FIRST,
    CallStyle,
    Message,
    Messages,
    TurnTemplate,
    closing_tokens,
    common_length,
    tool_message,
)

__all__ = ["Chat", "ChatSettings", "cached_chat", "encode_replies", "tool_message"]

# Text that follows other text is encoded with this prefix: some tokenizers insert a space at the start of a text.
_PREFIX = "!"
# Size of the cache of Chats per process.
_CACHED_CHATS = 64
# Time limit for encoding long replies.
_ENCODE_TIMEOUT_S = 60.0

# Processes for encoding long replies, by event loop and tokenizer.
_text_workers: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, TextWorkers]] = WeakKeyDictionary()

# The configuration key whose value is the `mode` of `Chat.check`.
_CHECK_KEY = "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode"
# In an error message of `check_template`, the number of characters shown of each text, from its end.
_MAX_SHOWN_CHARS = 200
_USER_MESSAGE: Message = {"role": "user", "content": "Go on."}


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

    def check(self, mode: str = "strict") -> list[str]:
        """Check the chat template with `check_template`; return warnings for the log.

        `mode`: strict, ignore_strippable (white space may differ) or disable (no check).
        """
        return [] if mode == "disable" else check_template(self, mode)

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


def check_template(chat: Chat, mode: str) -> list[str]:
    """Return warnings about the chat template: missing features, and changes that it makes to earlier turns.

    Conversations are simulated turn by turn: once for each end token, and once with turns truncated before an end
    token. Raises ValueError if the resulting tokens differ from those of the template applied to the whole
    conversation. `mode`: strict, or ignore_strippable (white space may differ).
    """
    return [f"the chat template {finding}." for finding in (*_missing_features(chat), *_rewritten_turns(chat, mode))]


def _missing_features(chat: Chat) -> Iterator[str]:
    """Yield descriptions of features that the template does not have."""
    if chat.has_tools and not chat.style.tool_role:
        yield "has no role for tools: tool results are sent as a user message in <tool_response> tags"
    if chat.has_tools and chat.turns.tool_name not in chat.render([FIRST], generation_prompt=True):
        yield "does not list the tools: describe them, and how to call them, in the prompt"


def _rewritten_turns(chat: Chat, mode: str) -> Iterator[str]:
    """Yield descriptions of the changes that the template makes to earlier turns."""
    user = [_USER_MESSAGE]
    tools = [tool_message(chat.turns.tool_name, f"Result {number}.", number) for number in range(2)]
    conversations: list[tuple[str, list[Messages]]] = [("a user", [user, user])]
    if chat.has_tools:
        conversations += [
            ("a tool", [tools[:1], tools[:1]]),
            ("several tools", [tools, tools]),
            ("a user", [tools, user]),
        ]
    changes: dict[str, list[str]] = {}
    for replier, rounds in conversations:
        change = _compare(chat, mode, replier, rounds)
        if change is not None and replier not in changes.setdefault(change, []):
            changes[change].append(replier)
    for change, repliers in changes.items():
        yield f"{change} after a reply of {' or '.join(repliers)}. Trajectories keep every turn as it was sampled"


def _compare(chat: Chat, mode: str, replier: str, rounds: Sequence[Messages]) -> str | None:
    """Simulate a conversation: for each of `rounds`, one turn of the model and these replies to it.

    Returns a description of the change that the template makes to earlier turns; None: it makes none.
    """
    probe = _Probe(chat)
    messages, prompt_text = probe.first, chat.render(probe.first, generation_prompt=True)
    contexts = [_SimulatedContext(chat, end, chat.encode(prompt_text)) for end in _end_tokens_to_check(chat)]
    for number, replies in enumerate(rounds):
        response = probe.response(number, replies)
        turn = chat.turns.turn_text(messages, response, probe.final_text(number))
        earlier, messages = messages, [*messages, response, *chat.style.to_template_format(replies)]
        next_prompt_text = chat.render(messages, generation_prompt=True)
        change = probe.change(prompt_text, next_prompt_text, number)
        # If the template rewrote earlier turns, this round is comparable only if the new text still contains the prompt
        # and the turn verbatim.
        is_comparable = change is None or (turn is not None and next_prompt_text.startswith(prompt_text + turn))
        if turn is not None and is_comparable:
            expected_ids = chat.encode(next_prompt_text)
            closing_text = _closing_text(chat, earlier, response, replies, probe.final_text(number))
            text_after_turn = next_prompt_text.removeprefix(prompt_text + turn)
            for context in contexts:
                context.add(prompt_text, turn, replies, closing_text, text_after_turn)
                context.compare(expected_ids, mode, replier)
        if change is not None:
            return change
        prompt_text = next_prompt_text
    return None


def _end_tokens_to_check(chat: Chat) -> list[int | None]:
    """Return the end tokens that are special tokens of the tokenizer; None stands for a truncated turn."""
    return [None, *sorted(chat.end_ids & chat.turns.special_token_ids)]


def _closing_text(chat: Chat, messages: Messages, response: Message, replies: Messages, final: str) -> str:
    """Return the text that the template writes after a response, up to and including its last end token ("" if none).

    It is derived from rendered text alone, not from the end tokens that `TurnTemplate` detects. `replies`: messages
    after the response. `final`: see `TurnTemplate.turn_text`.
    """
    start = chat.render(messages, generation_prompt=True) + (chat.turns.turn_text(messages, response, final) or "")
    formatted = chat.style.to_template_format(replies)
    after_last = chat.render([*messages, response], generation_prompt=False).removeprefix(start)
    after_earlier = chat.render([*messages, response, *formatted], generation_prompt=True).removeprefix(start)
    tokens = closing_tokens(after_last, after_earlier, chat.turns.special_tokens)
    if tokens:
        # The template writes the same tokens whether or not the response is the last message: they close it.
        return after_earlier[: tokens[-1].end()]
    if formatted[0]["role"] == "user":
        # In the text between the response and the user message's content, remove the tokens that open the message.
        return _closing_text_before_user(chat, after_earlier.partition(str(formatted[0]["content"]))[0])
    # Before a tool result, use the closing text before a user message if the template writes the same text here.
    plain = {"role": "assistant", "content": response["content"]}
    closing_text = _closing_text(chat, messages, plain, [_USER_MESSAGE], final)
    return closing_text if after_earlier.startswith(closing_text) else ""


def _closing_text_before_user(chat: Chat, between: str) -> str:
    """Like `_closing_text`, for `between`: the text between a response and the content of the following user message.

    The text that also precedes the first user message is removed. If no token remains, the template closes responses
    and user messages with the same token, or responses with none.
    """
    before_first, _, after_first = chat.turns.render_probe([FIRST], False).rpartition(str(FIRST["content"]))
    _, _, after_first_prompted = chat.turns.render_probe([FIRST], True).rpartition(str(FIRST["content"]))
    opening_length = common_length(between[::-1], before_first[::-1])
    before_opening = between[: len(between) - opening_length]
    tokens = closing_tokens(before_opening, before_opening, chat.turns.special_tokens)
    # The tokens that close user messages, with and without a generation prompt after them.
    tokens = tokens or closing_tokens(after_first, after_first_prompted, chat.turns.special_tokens)
    closing_text = tokens[-1].string[: tokens[-1].end()] if tokens else ""
    return closing_text if between.startswith(closing_text) else ""


class _SimulatedContext:
    """The context of a simulated model that ends every turn with the same token."""

    def __init__(self, chat: Chat, end: int | None, prompt_ids: list[int]) -> None:
        """`end`: id of the end token; None: all turns are truncated."""
        self._chat, self._end = chat, end
        self._token_ids = prompt_ids
        """Token ids of the conversation so far, with the template's end tokens in place of the sampled ones."""
        self._must_match = True
        """Whether token ids must match. False after a turn that is followed by plain text: the tokenizer may merge
        both, so only decoded text is compared."""

    def add(self, prompt_text: str, turn: str, replies: Messages, closing_text: str, text_after_turn: str) -> None:
        """Append a turn of the model, which follows `prompt_text`, and the replies to it.

        `text_after_turn`: what the template renders after the turn; `closing_text`: its beginning up to the last end
        token (`_closing_text`).
        """
        chat, prompt_ids = self._chat, self._chat.encode(prompt_text)
        sampled = chat.encode(prompt_text + turn)
        sampled = sampled[len(prompt_ids) :] if sampled[: len(prompt_ids)] == prompt_ids else chat.encode(turn)
        end_ids = [] if self._end is None else [self._end]
        suffix = chat.suffix(replies, sampled + end_ids)
        self._must_match = self._must_match and bool(chat.turns.special_tokens.match(text_after_turn.lstrip()))
        # Compare the end tokens that the template writes in place of the sampled one. If the template closes turns
        # without an end token, compare the sampled one only if the text after the turn begins with it (a role token).
        if self._end is not None and closing_text:
            end_ids = chat.encode(closing_text)
        elif self._end is not None and not text_after_turn.lstrip().startswith(chat.decode([self._end])):
            end_ids = []
        self._token_ids = self._token_ids + sampled + end_ids + suffix

    def compare(self, expected_ids: list[int], mode: str, replier: str) -> None:
        """Raise ValueError if the tokens differ from `expected_ids`, those of the whole conversation."""
        if self._token_ids == expected_ids:
            return
        text, expected_text = self._chat.decode(self._token_ids), self._chat.decode(expected_ids)
        if text == expected_text and not self._must_match:
            return
        only_white_space = "".join(text.split()) == "".join(expected_text.split())
        if only_white_space and mode == "ignore_strippable":
            return
        difference = "white space" if only_white_space else "text"
        remedy = f"Set {_CHECK_KEY}=disable to skip this check"
        if only_white_space:
            remedy = f"Set {_CHECK_KEY}=ignore_strippable to ignore differences in white space"
        turn = "a truncated turn" if self._end is None else f"a turn that ends with {self._chat.decode([self._end])}"
        raise ValueError(
            f"{_CHECK_KEY} = {mode}: after a reply of {replier} to {turn}, tokens appended turn by turn are not"
            f" those of the chat template (different {difference}): {text[-_MAX_SHOWN_CHARS:]!r} instead of"
            f" {expected_text[-_MAX_SHOWN_CHARS:]!r}. {remedy}."
        )


class _Probe:
    """A conversation whose parts can be located in the text that the template renders."""

    SYSTEM = "System prompt of the probe."

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self.first: list[Message] = [{"role": "system", "content": self.SYSTEM}, FIRST]
        try:
            text = chat.render(self.first, generation_prompt=True)
        except Exception:  # noqa: BLE001 - a template is a program: it may raise anything
            self.first = [FIRST]
            text = chat.render(self.first, generation_prompt=True)
        self._generation_prompt = text[len(chat.render(self.first, generation_prompt=False)) :]
        # A generation prompt that contains </think> switches thinking off.
        self._has_thinking = "think>" in str(chat.template) and "</think>" not in self._generation_prompt

    def final_text(self, number: int) -> str:
        """The text at the end of a response's content, which is also the argument of its tool calls."""
        return f"Answer {number}."

    def response(self, number: int, replies: Messages) -> Message:
        """The response of turn `number`, to which the environment sends `replies`."""
        final = self.final_text(number)
        text = f"<think>\n{self._thought(number)}\n</think>\n\n{final}" if self._has_thinking else final
        return self._chat.style.answer(text, replies, final)

    def change(self, before: str, after: str, number: int) -> str | None:
        """Describe the change that the template made to earlier turns; None: it made none.

        `before`: the prompt of turn `number`; `after`: the prompt of the next turn.
        """
        if self._has_thinking and any(self._thought(earlier) not in after for earlier in range(number + 1)):
            return "drops the thinking of earlier turns"
        if after.startswith(before):
            return None
        for part, text in (("the system prompt", self.SYSTEM), ("the list of tools", self._chat.turns.tool_name)):
            if text in before and before.find(text) != after.find(text):
                return f"moves or leaves out {part}"
        # "\0" differs from every character: there is a difference even if `after` is a prefix of `before`.
        start = next(index for index, (old, new) in enumerate(zip(before, after + "\0", strict=False)) if old != new)
        if start >= len(before) - len(self._generation_prompt):
            return f"does not repeat {before[start:]!r} of its generation prompt in earlier turns"
        return f"writes {after[start : start + 40]!r} instead of {before[start : start + 40]!r} in earlier turns"

    def _thought(self, number: int) -> str:
        return f"Thought {number}."
