"""Compare the tokens that a `Chat` appends turn by turn with the chat template applied to whole conversations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

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

__all__ = ["check_template"]

KEY = "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode"
# Characters of both texts in an error message.
_SHOWN = 200
_USER: Message = {"role": "user", "content": "Go on."}


class _Chat(Protocol):
    """The parts of `Chat` that are checked."""

    turns: TurnTemplate
    style: CallStyle
    end_ids: frozenset[int]

    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...
    def suffix(self, messages: Messages, answer: Sequence[int] = ()) -> list[int]: ...
    def render(self, messages: Messages, generation_prompt: bool) -> str: ...
    @property
    def has_tools(self) -> bool: ...
    @property
    def template(self) -> Any: ...


def check_template(chat: _Chat, mode: str) -> list[str]:
    """Descriptions of what the template lacks and of the changes that it makes to earlier turns, for the log.

    Conversations are built turn by turn, once per end token and once with truncated turns. Raises ValueError if the
    tokens differ from those of the whole conversation. `mode`: strict, or ignore_strippable (white space may differ).
    """
    return [f"the chat template {finding}." for finding in (*_missing(chat), *_rewrites(chat, mode))]


def _missing(chat: _Chat) -> Iterator[str]:
    """Features that the template does not have."""
    if chat.has_tools and not chat.style.tool_role:
        yield "has no role for tools: tool results are sent as a user message in <tool_response> tags"
    if chat.has_tools and chat.turns.tool_name not in chat.render([FIRST], generation_prompt=True):
        yield "does not list the tools: describe them, and how to call them, in the prompt"


def _rewrites(chat: _Chat, mode: str) -> Iterator[str]:
    """Changes that the template makes to earlier turns."""
    user = [_USER]
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
        yield f"{change} after a reply of {' or '.join(repliers)}. Trajectories keep every turn as the model saw it"


def _compare(chat: _Chat, mode: str, replier: str, rounds: Sequence[Messages]) -> str | None:
    """Simulate a conversation with one model turn before each of `rounds`, the replies to it.

    Returns the change that the template makes to earlier turns; None: it makes none.
    """
    probe = _Probe(chat)
    messages, before = probe.first, chat.render(probe.first, generation_prompt=True)
    contexts = [_Context(chat, end, chat.encode(before)) for end in _ends_to_try(chat)]
    for number, replies in enumerate(rounds):
        answer = probe.answer(number, replies)
        turn = chat.turns.turn_text(messages, answer, probe.final_text(number))
        earlier, messages = messages, [*messages, answer, *chat.style.written(replies)]
        after = chat.render(messages, generation_prompt=True)
        change = probe.change(before, after, number)
        if turn is not None and after.startswith(before if change is None else before + turn):
            whole = chat.encode(after)
            span = _closing_span(chat, earlier, answer, replies, probe.final_text(number))
            for context in contexts:
                context.add(before, turn, replies, span, after.removeprefix(before + turn))
                context.compare(whole, mode, replier)
        if change is not None:
            return change
        before = after
    return None


def _ends_to_try(chat: _Chat) -> list[int | None]:
    """The end tokens that are added tokens of the tokenizer, not text; None stands for a truncated turn."""
    marks = chat.turns.mark_ids
    return [None, *sorted(chat.end_ids & marks)]


def _closing_span(chat: _Chat, messages: Messages, answer: Message, replies: Messages, final: str) -> str:
    """The text up to the last end token that the template writes between `answer` and the replies; "": none.

    It is derived from rendered text alone, not from the end tokens that `TurnTemplate` detects. `final`: see
    `TurnTemplate.turn_text`.
    """
    start = chat.render(messages, generation_prompt=True) + (chat.turns.turn_text(messages, answer, final) or "")
    written = chat.style.written(replies)
    last = chat.render([*messages, answer], generation_prompt=False).removeprefix(start)
    after = chat.render([*messages, answer, *written], generation_prompt=True).removeprefix(start)
    tokens = closing_tokens(last, after, chat.turns.marks)
    if tokens:  # written whether or not a message follows
        return after[: tokens[-1].end()]
    if written[0]["role"] == "user":
        return _span_before_user(chat, after.partition(str(written[0]["content"]))[0])
    plain = {"role": "assistant", "content": answer["content"]}
    span = _closing_span(chat, messages, plain, [_USER], final)
    return span if after.startswith(span) else ""


def _span_before_user(chat: _Chat, between: str) -> str:
    """The same of `between`, the text between an answer and the content of a user message.

    The text that also precedes the first user message is removed. If no token remains, the template closes answers and
    user messages with the same token, or answers with none.
    """
    closed, prompted = (
        chat.turns.render_probe([FIRST], generation_prompt).rpartition(str(FIRST["content"]))
        for generation_prompt in (False, True)
    )
    shared = common_length(between[::-1], closed[0][::-1])
    before = between[: len(between) - shared]
    tokens = closing_tokens(before, before, chat.turns.marks)
    tokens = tokens or closing_tokens(closed[2], prompted[2], chat.turns.marks)
    span = tokens[-1].string[: tokens[-1].end()] if tokens else ""
    return span if between.startswith(span) else ""


class _Context:
    """The context of a simulated model that ends every turn with the same token."""

    def __init__(self, chat: _Chat, end: int | None, start: list[int]) -> None:
        """`end`: id of the end token; None: all turns are truncated. `start`: token ids of the prompt."""
        self._chat, self._end = chat, end
        self._token_ids = start
        """With the template's end tokens in place of the sampled ones, for the comparison."""
        self._exact = True
        """False: plain text follows a turn, and the template may tokenise both together."""

    def add(self, before: str, turn: str, replies: Messages, span: str, after: str) -> None:
        """Append a turn of the model, which follows the text `before`, and the replies to it.

        `after`: what the template renders after the turn; `span`: the part of it that the sampled end token replaces.
        """
        chat, start = self._chat, self._chat.encode(before)
        sampled = chat.encode(before + turn)
        sampled = sampled[len(start) :] if sampled[: len(start)] == start else chat.encode(turn)
        end_ids = [] if self._end is None else [self._end]
        suffix = chat.suffix(replies, sampled + end_ids)
        self._exact &= bool(chat.turns.marks.match(after.lstrip()))
        if self._end is not None and span:
            end_ids = chat.encode(span)
        elif self._end is not None and not after.lstrip().startswith(chat.decode([self._end])):
            end_ids = []
        self._token_ids = self._token_ids + sampled + end_ids + suffix

    def compare(self, whole: list[int], mode: str, replier: str) -> None:
        """Raise ValueError if the tokens differ from `whole`, those of the whole conversation."""
        if self._token_ids == whole:
            return
        ours, theirs = self._chat.decode(self._token_ids), self._chat.decode(whole)
        if ours == theirs and not self._exact:
            return
        only_white_space = "".join(ours.split()) == "".join(theirs.split())
        if only_white_space and mode == "ignore_strippable":
            return
        difference = "white space" if only_white_space else "text"
        remedy = f"Set {KEY}=disable to skip this check"
        if only_white_space:
            remedy = f"Set {KEY}=ignore_strippable to ignore differences in white space"
        turn = "a truncated turn" if self._end is None else f"a turn that ends with {self._chat.decode([self._end])}"
        raise ValueError(
            f"{KEY} = {mode}: after a reply of {replier} to {turn}, tokens appended turn by turn are not those of the"
            f" chat template (different {difference}): {ours[-_SHOWN:]!r} instead of {theirs[-_SHOWN:]!r}. {remedy}."
        )


class _Probe:
    """A conversation whose parts can be located in the text that the template renders."""

    SYSTEM = "System prompt of the probe."

    def __init__(self, chat: _Chat) -> None:
        self._chat = chat
        self.first: list[Message] = [{"role": "system", "content": self.SYSTEM}, FIRST]
        try:
            text = chat.render(self.first, generation_prompt=True)
        except Exception:  # noqa: BLE001 - a template is a program: it may raise anything
            self.first = [FIRST]
            text = chat.render(self.first, generation_prompt=True)
        self._prompt = text[len(chat.render(self.first, generation_prompt=False)) :]
        self._thinks = "think>" in str(chat.template) and "</think>" not in self._prompt

    def final_text(self, number: int) -> str:
        """The text at the end of an answer's content, which is also the argument of its tool calls."""
        return f"Answer {number}."

    def answer(self, number: int, replies: Messages) -> Message:
        """The assistant's message before these replies."""
        final = self.final_text(number)
        text = f"<think>\n{self._thought(number)}\n</think>\n\n{final}" if self._thinks else final
        return self._chat.style.answer(text, replies, final)

    def change(self, before: str, after: str, number: int) -> str | None:
        """A description of the change that the template made to earlier turns; None: it made none."""
        if self._thinks and any(self._thought(earlier) not in after for earlier in range(number + 1)):
            return "drops the thinking of earlier turns"
        if after.startswith(before):
            return None
        for part, text in (("the system prompt", self.SYSTEM), ("the list of tools", self._chat.turns.tool_name)):
            if text in before and before.find(text) != after.find(text):
                return f"moves or leaves out {part}"
        start = next(index for index, (old, new) in enumerate(zip(before, after + "\0", strict=False)) if old != new)
        if start >= len(before) - len(self._prompt):
            return f"does not repeat {before[start:]!r} of its generation prompt in earlier turns"
        return f"writes {after[start : start + 40]!r} instead of {before[start : start + 40]!r} in earlier turns"

    def _thought(self, number: int) -> str:
        return f"Thought {number}."
