"""Chat: a conversation as token ids, by the model's own chat template, appended to turn by turn.

The tokens of a turn stay as the model sampled them; only what comes after it is written by the template and tokenised.
To see what that is, the template writes a conversation whose last answer is a marker, and what follows the marker's
turn is taken. `check` compares this with the template applied to whole conversations, before anything is generated.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Chat", "tool_message"]

Message = Mapping[str, Any]
Messages = Sequence[Message]

KEY = "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode"
_FIRST: Message = {"role": "user", "content": "?"}


def tool_message(name: str, text: str, number: int = 0) -> dict[str, Any]:
    """A tool's answer; `number` counts the calls of one turn (ids have nine characters, as Mistral wants them)."""
    return {"role": "tool", "name": name, "content": text, "tool_call_id": f"call{number:05d}"}


@dataclass(frozen=True)
class _Style:
    """What a template wants of tool calls and their answers."""

    whole_calls: bool = True
    """As many calls as answers in one turn; else one call (Llama 3 writes no more)."""
    objects: bool = True
    """Arguments are objects; else their JSON."""
    tool_role: bool = True
    """There is a role for tools; else a user tells what they said."""

    def written(self, messages: Messages) -> list[Message]:
        """Messages as the template can write them."""
        if self.tool_role or not any(message["role"] == "tool" for message in messages):
            return list(messages)
        said = (
            f"<tool_response>\n{message['content']}\n</tool_response>"
            if message["role"] == "tool"
            else message["content"]
            for message in messages
        )
        return [{"role": "user", "content": "\n".join(said)}]

    def answer(self, text: str, replies: Messages, marker: str = "") -> dict[str, Any]:
        """The assistant's turn that these messages answer; its calls have the marker as argument."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        tools = [reply for reply in replies if reply["role"] == "tool"] if self.tool_role else []
        arguments: Any = {"of": marker or text} if self.objects else f'{{"of": "{marker or text}"}}'
        calls = [
            {"id": tool["tool_call_id"], "type": "function", "function": {"name": tool["name"], "arguments": arguments}}
            for tool in (tools if self.whole_calls else tools[:1])
        ]
        return message | {"tool_calls": calls} if calls else message


_STYLES = [_Style(whole, objects) for whole in (True, False) for objects in (True, False)] + [_Style(tool_role=False)]


class Chat:
    """Conversations of one model with one set of tools."""

    def __init__(
        self, tokenizer: Any, tools: Sequence[Mapping[str, Any]] | None = None, **template_kwargs: Any
    ) -> None:
        """`tools` as the OpenAI API describes them; other keywords are those of the chat template."""
        self._tokenizer, self._tools, self._kwargs = tokenizer, list(tools or []) or None, template_kwargs
        if self.template is None:
            raise ValueError(
                "the tokenizer has no chat template, and turns need one. Take a model that has one (-Instruct, -it), or"
                " give one in data.apply_chat_template_kwargs.chat_template."
            )
        self._marker = f"answer-{secrets.token_hex(8)}"  # no tool's text contains it
        self._special = _special_tokens(tokenizer)
        self.style = self._find_style()
        user, tool = {"role": "user", "content": "!"}, tool_message(self.tool_name, "!")
        self._ends = {"user": self._find_end([user]), "tool": self._find_end([tool])}
        every = {end for ends in self._ends.values() for end in ends if end} | {tokenizer.eos_token or ""}
        self.ends = frozenset(tokenizer.convert_tokens_to_ids(end) for end in every if end)
        """Ids of the tokens that end a turn of the model."""

    def start(self, messages: Messages) -> list[int]:
        """The conversation up to the model's first turn."""
        return self.encode(self.write(messages, ask=True))

    def suffix(self, messages: Messages, ended: bool) -> list[int]:
        """What is appended after a turn of the model that these messages answer, up to its next turn.

        `ended`: the turn's last token is one of `ends`; else the one that should be there comes first.
        """
        end, rest = self._after_turn(messages)
        # Together with the end token: some of those swallow white space, and some tokenizers begin texts with a space.
        ids = self.encode(end + rest)
        return ids[1:] if end and ended else ids

    def check(self, mode: str = "strict") -> list[str]:
        """What the template does to earlier turns, in words. Where we differ from it, a ValueError says how.

        `mode`: ignore_strippable passes over white space, disable looks at nothing.
        """
        if mode == "disable":
            return []
        return [f"the chat template {said}." for said in (*_lacks(self), *_rewrites(self, mode))]

    def written_call(self) -> str | None:
        """How the template writes a call of the first tool (its argument is `of`); None: it writes none."""
        told = [tool_message(self.tool_name, "!")]
        answer = self.style.answer("", told, self._marker)
        text = self.write([_FIRST, answer], ask=False)
        return text[len(self.write([_FIRST], ask=True)) :] if "tool_calls" in answer and self._marker in text else None

    @property
    def tool_name(self) -> str:
        """Of a tool to try templates with."""
        return str(self._tools[0]["function"]["name"]) if self._tools else "tool"

    def write(self, messages: Messages, ask: bool) -> str:
        """The template's text of a conversation; `ask`: with the generation prompt."""
        text: str = self._tokenizer.apply_chat_template(
            list(messages), tools=self._tools, tokenize=False, add_generation_prompt=ask, **self._kwargs
        )
        return text

    def encode(self, text: str) -> list[int]:
        """Its token ids."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Their text, special tokens and all."""
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

    def _after_turn(self, messages: Messages) -> tuple[str, str]:
        """The token that ends the turn before these messages, and what the template writes after it."""
        answer = self.style.answer(self._marker, messages)
        text = self.write([_FIRST, answer, *self.style.written(messages)], ask=True)
        after = text.rpartition(self._marker)[2]
        end = self._ends["tool" if messages[0]["role"] == "tool" else "user"][0]
        _, found, rest = after.partition(end) if end else ("", "", after)
        return (end, rest) if found else ("", after)

    def _find_style(self) -> _Style:
        """The first style in which the template writes the answers of two tools."""
        told = [tool_message(self.tool_name, f"{self._marker}-{number}", number) for number in range(2)]
        for style in _STYLES:
            try:
                text = self.write([_FIRST, style.answer("!", told), *style.written(told)], ask=True)
            except Exception:  # noqa: BLE001 - a template is a program of the model's: it may raise anything
                continue
            if all(str(message["content"]) in text for message in told):
                return style
        raise ValueError(
            "the chat template writes neither the answers of tools nor a user's message after the model's. "
            "Give one that does in data.apply_chat_template_kwargs.chat_template."
        )

    def _find_end(self, messages: Messages) -> tuple[str, str]:
        """The special token that ends an answer in front of these messages, and in front of nothing; "": none does."""
        answer = self.style.answer(self._marker, messages)
        last = self.write([_FIRST, answer], ask=False).rpartition(self._marker)[2]
        after = self.write([_FIRST, answer, *self.style.written(messages)], ask=True).rpartition(self._marker)[2]
        found = list(self._special.finditer(last))
        if found and last[: found[-1].start()] == after[: found[-1].start()]:
            here = self._special.match(after, found[-1].start())
            return (here.group() if here else "", found[-1].group())
        first = self._special.search(after)
        return (first.group() if first else "", found[-1].group() if found else "")


def _special_tokens(tokenizer: Any) -> re.Pattern[str]:
    added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    known = sorted({*added, *tokenizer.all_special_tokens} - {""}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, known)) or "(?!)")


def _lacks(chat: Chat) -> Iterator[str]:
    """What the template knows nothing of."""
    if chat.has_tools and not chat.style.tool_role:
        yield "has no role for tools: what they answer is given as a user's message, between <tool_response> tags"
    if chat.has_tools and chat.tool_name not in chat.write([_FIRST], ask=True):
        yield "does not list the tools: the prompt itself must say which there are and how they are called"


def _rewrites(chat: Chat, mode: str) -> Iterator[str]:
    """What it does to earlier turns."""
    user = [{"role": "user", "content": "Go on."}]
    tools = [tool_message(chat.tool_name, f"Result {number}.", number) for number in range(2)]
    conversations: list[tuple[str, list[Messages]]] = [("a user", [user, user])]
    if chat.has_tools:
        conversations += [
            ("a tool", [tools[:1], tools[:1]]),
            ("several tools", [tools, tools]),
            ("a user", [tools, user]),
        ]
    found: dict[str, list[str]] = {}
    for who, rounds in conversations:
        change = _compare(chat, mode, who, rounds)
        if change is not None and who not in found.setdefault(change, []):
            found[change].append(who)
    for change, whos in found.items():
        yield f"{change} once {' or '.join(whos)} answered. Trajectories keep every turn as the model saw it"


def _compare(chat: Chat, mode: str, who: str, rounds: Sequence[Messages]) -> str | None:
    """Walk through a conversation whose turns are answered as `rounds` say: what the template does to those before."""
    probe = _Probe(chat)
    messages, before = probe.first, chat.write(probe.first, ask=True)
    for number, replies in enumerate(rounds):
        messages = [*messages, probe.answer(number, replies), *chat.style.written(replies)]
        after = chat.write(messages, ask=True)
        change = probe.change(before, after, number)
        if after.startswith(before):
            _compare_tokens(chat, mode, who, before, after, replies)
        if change is not None:
            return change
        before = after
    return None


class _Probe:
    """Pieces of a conversation that are found again in what the template makes of it."""

    SYSTEM = "Be kind to probes."

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self.first: list[Message] = [{"role": "system", "content": self.SYSTEM}, _FIRST]
        try:
            text = chat.write(self.first, ask=True)
        except Exception:  # noqa: BLE001 - a template is a program of the model's: it may raise anything
            self.first = [_FIRST]
            text = chat.write(self.first, ask=True)
        self._prompt = text[len(chat.write(self.first, ask=False)) :]
        self._thinks = "think>" in str(chat.template) and "</think>" not in self._prompt

    def answer(self, number: int, replies: Messages) -> Message:
        said = f"Answer {number}."
        text = f"<think>\n{self._thought(number)}\n</think>\n\n{said}" if self._thinks else said
        return self._chat.style.answer(text, replies, said)

    def change(self, before: str, after: str, number: int) -> str | None:
        """What of the turns before is other in the text after them, in words."""
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


def _compare_tokens(chat: Chat, mode: str, who: str, before: str, after: str, replies: Messages) -> None:
    """The template's text after a turn begins with the tokens before it, and ends with our suffix."""
    whole, start, end = chat.encode(after), chat.encode(before), chat.suffix(replies, ended=False)
    for ours, theirs in ((start, whole[: len(start)]), (end, whole[len(whole) - len(end) :])):
        said, written = chat.decode(ours), chat.decode(theirs)
        same = "".join(said.split()) == "".join(written.split())
        if ours != theirs and not (same and mode == "ignore_strippable"):
            what = "white space" if same else "text"
            remedy = f"{KEY}=ignore_strippable passes over that" if same else f"{KEY}=disable goes on all the same"
            raise ValueError(
                f"{KEY} = {mode}: once {who} answered, tokens appended turn by turn are not those of the chat template"
                f" ({what}): {said[-200:]!r} for {written[-200:]!r}. {remedy}."
            )
