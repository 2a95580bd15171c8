"""TurnTemplate: where a model's turn ends in the text of a chat template, and what the template writes after it.

A template is probed: it renders a conversation whose answer is a marker, and the text after the marker is inspected.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "FIRST",
    "CallStyle",
    "Message",
    "Messages",
    "TurnEnd",
    "TurnTemplate",
    "added_tokens",
    "role_tokens",
    "tool_message",
]

Message = Mapping[str, Any]
Messages = Sequence[Message]

FIRST: Message = {"role": "user", "content": "?"}
_SYSTEM: Message = {"role": "system", "content": "?"}


def tool_message(name: str, text: str, number: int = 0) -> dict[str, Any]:
    """A tool result. `number` counts the calls of one turn (the ids have nine characters: Mistral requires that)."""
    return {"role": "tool", "name": name, "content": text, "tool_call_id": f"call{number:05d}"}


@dataclass(frozen=True)
class CallStyle:
    """The form of tool calls and tool results that a template accepts."""

    whole_calls: bool = True
    """One call per result in a turn; else a single call (Llama 3 renders no more)."""
    objects: bool = True
    """Arguments are objects; else JSON text."""
    tool_role: bool = True
    """The template has a tool role; else results are sent as a user message."""

    def written(self, messages: Messages) -> list[Message]:
        """The messages in the form that the template accepts."""
        if self.tool_role or not any(message["role"] == "tool" for message in messages):
            return list(messages)
        texts = (
            f"<tool_response>\n{message['content']}\n</tool_response>"
            if message["role"] == "tool"
            else message["content"]
            for message in messages
        )
        return [{"role": "user", "content": "\n".join(texts)}]

    def answer(self, text: str, replies: Messages, marker: str = "") -> dict[str, Any]:
        """The assistant turn that `replies` respond to; its calls have the marker as argument."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        tools = [reply for reply in replies if reply["role"] == "tool"] if self.tool_role else []
        arguments: Any = {"of": marker or text} if self.objects else f'{{"of": "{marker or text}"}}'
        calls = [
            {"id": tool["tool_call_id"], "type": "function", "function": {"name": tool["name"], "arguments": arguments}}
            for tool in (tools if self.whole_calls else tools[:1])
        ]
        return message | {"tool_calls": calls} if calls else message


_STYLES = [CallStyle(whole, objects) for whole in (True, False) for objects in (True, False)]
_STYLES.append(CallStyle(tool_role=False))


@dataclass(frozen=True)
class TurnEnd:
    """What a template writes after the text of a turn."""

    token: str
    """The end token of the turn; "": the template writes none."""
    rest: str
    """The text after it, up to the model's next turn."""
    role_token: str
    """Without an end token: the token that opens the next message, and so ends the turn; "": plain text does."""


class TurnTemplate:
    """A chat template with its arguments and one set of tools."""

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """`tools` as the OpenAI API describes them. Raises whatever the template raises for an answer to a user."""
        self._tokenizer, self._tools, self._kwargs = tokenizer, list(tools or []) or None, dict(template_kwargs or {})
        self._marker = f"answer-{secrets.token_hex(8)}"  # no tool result contains it
        marks = added_tokens(tokenizer)
        self.mark_ids = frozenset(marks.values())
        """Ids of the tokens that a template may end turns with."""
        self._known = _token_pattern(marks)
        self.tool_name = str(self._tools[0]["function"]["name"]) if self._tools else "tool"
        self._plain_end = self._text_after({"role": "assistant", "content": self._marker})
        self._style = self._find_style()
        self._ends: dict[str, str] = {}
        if self._style is not None:
            user, tool = {"role": "user", "content": "!"}, tool_message(self.tool_name, "!")
            self._ends = {"user": self._find_end([user]), "tool": self._find_end([tool])}

    @property
    def style(self) -> CallStyle:
        """Raises ValueError where the template renders neither tool results nor a user message after an answer."""
        if self._style is None:
            raise ValueError(
                "the chat template renders neither tool results nor a user message after an answer. "
                "Set data.apply_chat_template_kwargs.chat_template to one that does."
            )
        return self._style

    def render(self, messages: Messages, generation_prompt: bool) -> str:
        """The text of a conversation."""
        text: str = self._tokenizer.apply_chat_template(
            list(messages),
            tools=self._tools,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **self._kwargs,
        )
        return text

    def after_turn(self, replies: Messages) -> TurnEnd:
        """What the template writes after a turn that `replies` respond to."""
        answer = self.style.answer(self._marker, replies)
        after = self._text_after(answer, self.style.written(replies))
        end = self._ends["tool" if replies[0]["role"] == "tool" else "user"]
        _, found, rest = after.partition(end) if end else ("", "", after)
        if found:
            return TurnEnd(end, rest, "")
        rest = after[_common_length(after, self._closing(answer)) :]
        return TurnEnd("", rest, self._opening(rest))

    def turn_text(self, messages: Messages, answer: Message, said: str) -> str | None:
        """The text of a last answer as the model writes it, without an end token.

        `said` is the end of its content and of its calls' arguments. None: the template changes its generation prompt.
        """
        before = self.render(messages, generation_prompt=True)
        text = self.render([*messages, answer], generation_prompt=False)
        place = text.rfind(said, len(before)) + len(said)
        if not text.startswith(before) or place < len(before) + len(said):
            return None
        plain = {"role": "assistant", "content": answer["content"]}
        separator = self.render([*messages, plain], generation_prompt=False).rpartition(said)[2]
        place += len(_closing(text[place:], separator, self._known))
        if self._opening(text[place:]):  # white space before an end token is the model's
            place = len(text) - len(text[place:].lstrip())
        return text[len(before) : place]

    def end_tokens(self) -> list[str]:
        """Tokens with which the model itself ends a turn, as far as the template shows them.

        These are the token after a last answer, the one after a last tool call, and, where the template writes none,
        the tokens that open the next message.
        """
        found = [self._opening(self._plain_end)]
        if self._style is not None:
            user, tool = {"role": "user", "content": "!"}, tool_message(self.tool_name, "!")
            found.append(self._last_end(self._style.answer(self._marker, [tool])))
            found += [self.after_turn([reply]).role_token for reply in (user, tool)]
        return [token for token in dict.fromkeys(found) if token]

    def rendered_call(self) -> str | None:
        """How the template writes a call of the first tool (its argument is `of`); None: it writes none."""
        answer = self.style.answer("", [tool_message(self.tool_name, "!")], self._marker)
        text = self.render([FIRST, answer], generation_prompt=False)
        if "tool_calls" not in answer or self._marker not in text:
            return None
        return text[len(self.render([FIRST], generation_prompt=True)) :]

    # ---------------------------------------------------------------- probes

    def _text_after(self, answer: Message, replies: Messages = ()) -> str:
        """The text after the marker in an answer, with the replies to it and the generation prompt, if any."""
        conversation = [FIRST, answer, *replies]
        try:
            text = self.render(conversation, generation_prompt=bool(replies))
        except Exception:  # noqa: BLE001 - a template is a program: one that requires a system message raises anything
            text = self.render([_SYSTEM, *conversation], generation_prompt=bool(replies))
        return text.rpartition(self._marker)[2] if self._marker in text else ""

    def _find_style(self) -> CallStyle | None:
        """The first style in which the template renders two tool results; None: it renders them in no style."""
        results = [tool_message(self.tool_name, f"{self._marker}-{number}", number) for number in range(2)]
        for style in _STYLES:
            conversation = [FIRST, style.answer("!", results), *style.written(results)]
            for messages in (conversation, [_SYSTEM, *conversation]):
                try:
                    text = self.render(messages, generation_prompt=True)
                except Exception:  # noqa: BLE001 - a template is a program: it may raise anything
                    continue
                if all(str(message["content"]) in text for message in results):
                    return style
        return None

    def _find_end(self, replies: Messages) -> str:
        """The end token of a turn before these replies; "": none."""
        answer = self.style.answer(self._marker, replies)
        last, after = self._text_after(answer), self._text_after(answer, self.style.written(replies))
        start = len(self._closing(answer))
        common = last[: _common_length(last, after)]
        match = self._known.search(common, start) or self._known.search(last, start)
        if match is None:
            return ""
        if match.end() <= len(common):
            return match.group()
        # The last turn and earlier turns end with different tokens (gpt-oss), or only the last one has an end token.
        earlier = self._known.match(after, match.start()) if match.start() <= len(common) else None
        return earlier.group() if earlier and self._ends_any_turn(earlier.group(), match.start()) else ""

    def _ends_any_turn(self, token: str, place: int) -> bool:
        """The token follows an answer whatever the next message is: it does not open the message."""
        answer = {"role": "assistant", "content": self._marker}
        try:
            return self._text_after(answer, [{"role": "assistant", "content": "!"}]).startswith(token, place)
        except Exception:  # noqa: BLE001 - a template is a program: many refuse two answers in a row
            return True

    def _closing(self, answer: Message) -> str:
        """The part of the text after the marker that the model writes itself: the end of its tool calls."""
        return _closing(self._text_after(answer), self._plain_end, self._known) if "tool_calls" in answer else ""

    def _last_end(self, answer: Message) -> str:
        """The token that ends a last turn; "": none."""
        return self._opening(self._text_after(answer)[len(self._closing(answer)) :])

    def _opening(self, text: str) -> str:
        """The token at the beginning of a text, white space aside."""
        match = self._known.match(text.lstrip())
        return match.group() if match else ""


def role_tokens(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> dict[str, str]:
    """By the kind of the next message (user, tool), the token that opens it and so ends the turn before it.

    Only where the template writes no end token, and nothing between the turn and that token.
    """
    found = {}
    for kind, reply in (("user", {"role": "user", "content": "!"}), ("tool", tool_message("tool", "!"))):
        try:
            end = TurnTemplate(tokenizer, None, template_kwargs).after_turn([reply])
        except Exception:  # noqa: BLE001 - a template is a program: it may raise anything
            continue
        if end.role_token and end.rest.startswith(end.role_token):
            found[kind] = end.role_token
    return found


def _closing(last: str, plain_end: str, known: re.Pattern[str]) -> str:
    """Of the text after the content of a last turn, the part before what ends the turn.

    `plain_end` is what the template writes after an answer without tool calls.
    """
    if last.endswith(plain_end):
        return last[: len(last) - len(plain_end)]
    *_, end = [0, *(match.start() for match in known.finditer(last.rstrip()))]
    return last[:end]


def added_tokens(tokenizer: Any) -> dict[str, int]:
    """Tokens that a template may use as marks, with their ids: added ones, whether registered as special or not.

    White space is none of them: Gemma's tokenizers add tokens for line breaks.
    """
    tokens = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
    return {token: tokenizer.convert_tokens_to_ids(token) for token in sorted(tokens) if token.strip()}


def _common_length(first: str, second: str) -> int:
    """How many characters two texts begin with in common."""
    differs = (place for place, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    return next(differs, min(len(first), len(second)))


def _token_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches a token; of several that begin at one place, the longest."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")
