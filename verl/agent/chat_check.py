"""Compare whole conversations of a chat template with the tokens that a `Chat` feeds to the model turn by turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from verl.utils.turn_template import FIRST, CallStyle, Message, Messages, TurnTemplate, tool_message

__all__ = ["check_template"]

KEY = "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode"
_SHOWN = 200  # characters


class _Chat(Protocol):
    """The parts of `Chat` that are checked."""

    turns: TurnTemplate
    style: CallStyle
    ends: frozenset[int]

    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...
    def suffix(self, messages: Messages, answer: Sequence[int] = ()) -> list[int]: ...
    def write(self, messages: Messages, ask: bool) -> str: ...
    @property
    def has_tools(self) -> bool: ...
    @property
    def tool_name(self) -> str: ...
    @property
    def template(self) -> Any: ...


def check_template(chat: _Chat, mode: str) -> list[str]:
    """What the template lacks and what it does to earlier turns, in words.

    ValueError: a conversation that is fed turn by turn, each turn ended by any of the end tokens or cut, differs from
    the template's text of the whole conversation. `mode` is strict or ignore_strippable (white space may differ).
    """
    return [f"the chat template {finding}." for finding in (*_missing(chat), *_rewrites(chat, mode))]


def _missing(chat: _Chat) -> Iterator[str]:
    """Features that the template does not have."""
    if chat.has_tools and not chat.style.tool_role:
        yield "has no role for tools: what they answer is given as a user's message, between <tool_response> tags"
    if chat.has_tools and chat.tool_name not in chat.write([FIRST], ask=True):
        yield "does not list the tools: the prompt itself must say which there are and how they are called"


def _rewrites(chat: _Chat, mode: str) -> Iterator[str]:
    """Changes that the template makes to earlier turns."""
    user = [{"role": "user", "content": "Go on."}]
    tools = [tool_message(chat.tool_name, f"Result {number}.", number) for number in range(2)]
    conversations: list[tuple[str, list[Messages]]] = [("a user", [user, user])]
    if chat.has_tools:
        conversations += [
            ("a tool", [tools[:1], tools[:1]]),
            ("several tools", [tools, tools]),
            ("a user", [tools, user]),
        ]
    changes: dict[str, list[str]] = {}
    for who, rounds in conversations:
        change = _compare(chat, mode, who, rounds)
        if change is not None and who not in changes.setdefault(change, []):
            changes[change].append(who)
    for change, roles in changes.items():
        yield f"{change} once {' or '.join(roles)} answered. Trajectories keep every turn as the model saw it"


def _compare(chat: _Chat, mode: str, who: str, rounds: Sequence[Messages]) -> str | None:
    """Run through a conversation whose turns get these replies; the change that the template makes to earlier turns."""
    probe = _Probe(chat)
    messages, before = probe.first, chat.write(probe.first, ask=True)
    feeds = [_Feed(chat, end, chat.encode(before)) for end in _ends_to_try(chat)]
    for number, replies in enumerate(rounds):
        answer = probe.answer(number, replies)
        turn = chat.turns.turn_text(messages, answer, probe.said(number))
        messages = [*messages, answer, *chat.style.written(replies)]
        after = chat.write(messages, ask=True)
        change = probe.change(before, after, number)
        if turn is not None and after.startswith(before if change is None else before + turn):
            whole = chat.encode(after)
            for feed in feeds:
                feed.add(before, turn, replies)
                feed.compare(whole, mode, who)
        if change is not None:
            return change
        before = after
    return None


def _ends_to_try(chat: _Chat) -> list[int | None]:
    """The end tokens that are marks rather than text; None: a turn that was cut."""
    marks = chat.turns.mark_ids
    return [None, *sorted(chat.ends & marks)]


class _Feed:
    """The tokens fed to a model that ends all its turns with one token."""

    def __init__(self, chat: _Chat, end: int | None, start: list[int]) -> None:
        """`end` is None for turns that are cut."""
        self._chat, self._end = chat, end
        self._fed = start
        """With the template's end tokens in place of those sampled."""
        self._exact = True
        """False: a turn is followed by plain text, which the template's tokens may be merged with."""

    def add(self, before: str, turn: str, replies: Messages) -> None:
        """A turn of the model after the text `before`, and the replies to it."""
        chat, start = self._chat, self._chat.encode(before)
        sampled = chat.encode(before + turn)
        sampled = sampled[len(start) :] if sampled[: len(start)] == start else chat.encode(turn)
        ended = [] if self._end is None else [self._end]
        suffix, end = chat.suffix(replies, sampled + ended), chat.turns.after_turn(replies)
        self._exact &= bool(end.token or end.role_token)
        if ended:
            if end.token:
                ended = chat.encode(end.token)
            elif not end.role_token or chat.encode(end.role_token) != ended:
                ended = []
        self._fed = self._fed + sampled + ended + suffix

    def compare(self, whole: list[int], mode: str, who: str) -> None:
        """Raise ValueError where the tokens fed are not those of the whole conversation."""
        if self._fed == whole:
            return
        fed, written = self._chat.decode(self._fed), self._chat.decode(whole)
        if fed == written and not self._exact:
            return
        same = "".join(fed.split()) == "".join(written.split())
        if same and mode == "ignore_strippable":
            return
        what = "white space" if same else "text"
        remedy = f"{KEY}=ignore_strippable passes over that" if same else f"{KEY}=disable goes on all the same"
        ended = (
            "a turn that was cut" if self._end is None else f"a turn that ended with {self._chat.decode([self._end])}"
        )
        raise ValueError(
            f"{KEY} = {mode}: once {who} answered {ended}, tokens appended turn by turn are not those of the chat"
            f" template ({what}): {fed[-_SHOWN:]!r} for {written[-_SHOWN:]!r}. {remedy}."
        )


class _Probe:
    """Messages whose parts can be located in the text that the template makes of them."""

    SYSTEM = "Be kind to probes."

    def __init__(self, chat: _Chat) -> None:
        self._chat = chat
        self.first: list[Message] = [{"role": "system", "content": self.SYSTEM}, FIRST]
        try:
            text = chat.write(self.first, ask=True)
        except Exception:  # noqa: BLE001 - a template is a program: it may raise anything
            self.first = [FIRST]
            text = chat.write(self.first, ask=True)
        self._prompt = text[len(chat.write(self.first, ask=False)) :]
        self._thinks = "think>" in str(chat.template) and "</think>" not in self._prompt

    def said(self, number: int) -> str:
        """The end of an answer's content, and the argument of its calls."""
        return f"Answer {number}."

    def answer(self, number: int, replies: Messages) -> Message:
        """The assistant's message before these replies."""
        said = self.said(number)
        text = f"<think>\n{self._thought(number)}\n</think>\n\n{said}" if self._thinks else said
        return self._chat.style.answer(text, replies, said)

    def change(self, before: str, after: str, number: int) -> str | None:
        """The change that the template made to the turns before, in words."""
        if self._thinks and any(self._thought(earlier) not in after for earlier in range(number + 1)):
            return "leaves out what the model thought in earlier turns"
        if after.startswith(before):
            return None
        for what, text in (("the system prompt", self.SYSTEM), ("the list of tools", self._chat.tool_name)):
            if text in before and before.find(text) != after.find(text):
                return f"moves or leaves out {what}"
        place = next(place for place, (old, new) in enumerate(zip(before, after + "\0", strict=False)) if old != new)
        if place >= len(before) - len(self._prompt):
            return f"does not repeat {before[place:]!r} of its generation prompt in earlier turns"
        return f"writes {after[place : place + 40]!r} for {before[place : place + 40]!r} in earlier turns"

    def _thought(self, number: int) -> str:
        return f"Thought {number}."
