"""TurnTemplate: where a model's turn ends in the text of a chat template, and what the template writes after it.

A template is probed: it renders a conversation with a marker as assistant message, and the text after the marker is
inspected.
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
    "closing_tokens",
    "common_length",
    "role_tokens",
    "tool_message",
]

Message = Mapping[str, Any]
Messages = Sequence[Message]

FIRST: Message = {"role": "user", "content": "?"}
_SYSTEM: Message = {"role": "system", "content": "?"}
_USER: Message = {"role": "user", "content": "next-user-message"}


def tool_message(name: str, text: str, number: int = 0) -> dict[str, Any]:
    """A tool result. `number` counts the calls of one turn (the ids have nine characters: Mistral requires that)."""
    return {"role": "tool", "name": name, "content": text, "tool_call_id": f"call{number:05d}"}


@dataclass(frozen=True)
class CallStyle:
    """The form of tool calls and tool results that a template accepts."""

    parallel_calls: bool = True
    """A turn may have several calls, one per result; else a single call (Llama 3 renders no more)."""
    dict_arguments: bool = True
    """Arguments of calls are dicts; else JSON text."""
    tool_role: bool = True
    """The template has a tool role; else results are sent as a user message."""

    def to_template_format(self, messages: Messages) -> list[Message]:
        """The messages in the form that the template accepts: without a tool role, tool results as a user message."""
        if self.tool_role or not any(message["role"] == "tool" for message in messages):
            return list(messages)
        texts = (
            f"<tool_response>\n{message['content']}\n</tool_response>"
            if message["role"] == "tool"
            else message["content"]
            for message in messages
        )
        return [{"role": "user", "content": "\n".join(texts)}]

    def assistant_message(self, text: str, replies: Messages, marker: str = "") -> dict[str, Any]:
        """The assistant message that `replies` follow; its calls have the marker as argument."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        tools = [reply for reply in replies if reply["role"] == "tool"] if self.tool_role else []
        arguments: Any = {"of": marker or text} if self.dict_arguments else f'{{"of": "{marker or text}"}}'
        calls = [
            {"id": tool["tool_call_id"], "type": "function", "function": {"name": tool["name"], "arguments": arguments}}
            for tool in (tools if self.parallel_calls else tools[:1])
        ]
        return message | {"tool_calls": calls} if calls else message


_STYLES = [CallStyle(parallel, dicts) for parallel in (True, False) for dicts in (True, False)]
_STYLES.append(CallStyle(tool_role=False))


@dataclass(frozen=True)
class TurnEnd:
    """What a template writes after the text of a turn."""

    token: str
    """The end token of the turn; "": the template writes none."""
    rest: str
    """The text after it, up to the model's next turn."""
    role_token: str
    """If there is no end token: the token that opens the next message and so ends the turn; "": plain text ends it."""


class TurnTemplate:
    """A chat template with its arguments and one set of tools."""

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """`tools` in the format of the OpenAI API. Raises the template's error if it cannot render an assistant
        message."""
        self._tokenizer, self._tools, self._kwargs = tokenizer, list(tools or []) or None, dict(template_kwargs or {})
        self._marker = f"answer-{secrets.token_hex(8)}"  # no tool result contains it
        self._plain_message = {"role": "assistant", "content": self._marker}
        special_tokens = added_tokens(tokenizer)
        self.special_token_ids = frozenset(special_tokens.values())
        """Ids of the tokens with which a template may end turns (`added_tokens`)."""
        self.special_tokens = _token_pattern(special_tokens)
        """Matches one of these tokens."""
        self.tool_name = str(self._tools[0]["function"]["name"]) if self._tools else "tool"
        self._style = self._find_style()
        plain = self._text_after(self._plain_message)
        self._inner = self._find_inner(plain)
        self._plain_end = plain[len(self._inner) :]
        self._ends: dict[str, str] = {}
        if self._style is not None:
            self._ends["user"] = self._ends["tool"] = self.find_end([_USER])
            if self._style.tool_role:
                self._ends["tool"] = self.find_end([tool_message(self.tool_name, "!")])

    @property
    def style(self) -> CallStyle:
        """The form that the template accepts. ValueError: it renders neither tool results nor a user message after an
        assistant message."""
        if self._style is None:
            raise ValueError(
                "the chat template renders neither tool results nor a user message after an assistant message. "
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

    def render_probe(self, conversation: Messages, generation_prompt: bool) -> str:
        """The text of a conversation, with a system message if the template requires one."""
        try:
            return self.render(conversation, generation_prompt)
        except Exception:  # noqa: BLE001 - a template is a program: it may require a system message
            return self.render([_SYSTEM, *conversation], generation_prompt)

    def after_turn(self, replies: Messages) -> TurnEnd:
        """What the template writes after a turn that `replies` respond to."""
        message = self.style.assistant_message(self._marker, replies)
        after = self._text_after(message, self.style.to_template_format(replies))
        end = self._ends["tool" if replies[0]["role"] == "tool" else "user"]
        _, found, rest = after.partition(end) if end else ("", "", after)
        if found:
            return TurnEnd(end, rest, "")
        rest = after[common_length(after, self._closing(message)) :]
        return TurnEnd("", rest, self._opening(rest))

    def turn_text(self, messages: Messages, response: Message, final: str) -> str | None:
        """The text of the last assistant message as the model generates it, without an end token.

        `final` is the text at the end of its content and of its calls' arguments. None: the rendered message does not
        begin with the generation prompt.
        """
        before = self.render(messages, generation_prompt=True)
        text = self.render([*messages, response], generation_prompt=False)
        end = text.rfind(final, len(before)) + len(final)
        if not text.startswith(before) or end < len(before) + len(final):
            return None
        plain = {"role": "assistant", "content": response["content"]}
        separator = self.render([*messages, plain], generation_prompt=False).rpartition(final)[2]
        separator = separator.removeprefix(self._inner)
        end += len(_closing(text[end:], separator, self.special_tokens))
        if self._opening(text[end:]):  # the model generates the white space before an end token
            end = len(text) - len(text[end:].lstrip())
        return text[len(before) : end]

    def end_tokens(self) -> list[str]:
        """Tokens with which the model ends a turn, as far as the template shows them.

        These are the token after a last response, the token after a last tool call and, if the template writes no end
        token, the tokens that open the next message.
        """
        tokens = [self._opening(self._plain_end)]
        if self._style is not None:
            tool = tool_message(self.tool_name, "!")
            tokens.append(self._last_end(self._style.assistant_message(self._marker, [tool])))
            tokens += [self.after_turn([reply]).role_token for reply in (_USER, tool)]
        return [token for token in dict.fromkeys(tokens) if token]

    def rendered_call(self) -> str | None:
        """A call of the first tool (its argument is `of`) as the template renders it; None: it renders no calls."""
        message = self.style.assistant_message("", [tool_message(self.tool_name, "!")], self._marker)
        text = self.render([FIRST, message], generation_prompt=False)
        if "tool_calls" not in message or self._marker not in text:
            return None
        return text[len(self.render([FIRST], generation_prompt=True)) :]

    # ---------------------------------------------------------------- probes

    def _text_after(self, message: Message, replies: Messages = ()) -> str:
        """The rendered text after the marker in `message`; with `replies`, including them and the generation prompt."""
        text = self.render_probe([FIRST, message, *replies], generation_prompt=bool(replies))
        return text.rpartition(self._marker)[2] if self._marker in text else ""

    def _find_style(self) -> CallStyle | None:
        """The first style in which the template renders two tool results; None: it renders them in no style."""
        results = [tool_message(self.tool_name, f"{self._marker}-{number}", number) for number in range(2)]
        for style in _STYLES:
            conversation = [FIRST, style.assistant_message("!", results), *style.to_template_format(results)]
            for messages in (conversation, [_SYSTEM, *conversation]):
                try:
                    text = self.render(messages, generation_prompt=True)
                except Exception:  # noqa: BLE001 - a template is a program: it may raise anything
                    continue
                if all(str(message["content"]) in text for message in results):
                    return style
        return None

    def _find_inner(self, last: str) -> str:
        """The text that the model generates after the content of a response and before its end token.

        It is not empty if the template closes a turn with adjacent tokens (Command R7B): the last of them is the end
        token. Tokens that the template writes only at the end of a conversation (Phi-3) are not counted.
        """
        if self._style is None:
            return ""
        closing = closing_tokens(last, self._text_after(self._plain_message, [_USER]), self.special_tokens)
        return closing[-2].string[: closing[-1].start()] if len(closing) > 1 else ""

    def find_end(self, replies: Messages) -> str:
        """The end token of a turn before these replies; "": none."""
        message = self.style.assistant_message(self._marker, replies)
        last, after = self._text_after(message), self._text_after(message, self.style.to_template_format(replies))
        start = len(self._closing(message))
        if closing := closing_tokens(last, after, self.special_tokens, start):
            return closing[0].group()
        # The last turn and earlier turns end with different tokens (gpt-oss), or only the last one has an end token.
        match = self.special_tokens.search(last, start)
        earlier = (
            self.special_tokens.match(after, match.start())
            if match and after.startswith(last[: match.start()])
            else None
        )
        if earlier is None:
            return ""
        if replies[0]["role"] == "user":
            return "" if self._opens_user_message(earlier) else earlier.group()
        closes = earlier.group() == self._ends["user"] or self._precedes_assistant(earlier, message)
        return earlier.group() if self._ends["user"] and closes else ""

    def _opens_user_message(self, token: re.Match[str]) -> bool:
        """Whether `token`, which follows an assistant message, is part of the user message after it.

        It is if the same text precedes the content of a first user message. A token that also closes user messages, or
        that precedes other messages (but not the generation prompt), is an end token.
        """
        first = {"role": "user", "content": self._marker}
        before, _, behind = self.render_probe([first], generation_prompt=False).rpartition(self._marker)
        opening = token.string[token.start() :].partition(str(_USER["content"]))[0]
        if token.group() in behind or not before.endswith(opening):
            return False
        prompt = self.render_probe([first], generation_prompt=True).rpartition(self._marker)[2]
        return prompt.lstrip().startswith(token.group()) or not self._precedes_assistant(token, self._plain_message)

    def _precedes_assistant(self, token: re.Match[str], message: Message) -> bool:
        """Whether `token` also follows `message` if another assistant message is next. False: the template refuses
        that."""
        try:
            after = self._text_after(message, [{"role": "assistant", "content": "!"}])
        except Exception:  # noqa: BLE001 - a template is a program: many refuse two assistant messages in a row
            return False
        return after.startswith(token.group(), token.start())

    def _closing(self, message: Message) -> str:
        """The part of the text after the marker that the model generates before the end token."""
        if "tool_calls" not in message:
            return self._inner
        return _closing(self._text_after(message), self._plain_end, self.special_tokens)

    def _last_end(self, message: Message) -> str:
        """The token that ends a last turn; "": none."""
        return self._opening(self._text_after(message)[len(self._closing(message)) :])

    def _opening(self, text: str) -> str:
        """The token at the beginning of a text, white space aside."""
        match = self.special_tokens.match(text.lstrip())
        return match.group() if match else ""


def role_tokens(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> dict[str, str]:
    """By role of the next message (user, tool), the token that opens it and so ends the turn before it.

    Empty if the template writes an end token, or text between the turn and the role token.
    """
    tokens = {}
    for role, reply in (("user", _USER), ("tool", tool_message("tool", "!"))):
        try:
            end = TurnTemplate(tokenizer, None, template_kwargs).after_turn([reply])
        except Exception:  # noqa: BLE001 - a template is a program: it may raise anything
            continue
        if end.role_token and end.rest.startswith(end.role_token):
            tokens[role] = end.role_token
    return tokens


def _closing(last: str, plain_end: str, known: re.Pattern[str]) -> str:
    """The part of `last`, the text after the content of a last turn, that comes before the turn's end.

    `plain_end`: the text that the template writes after an assistant message without tool calls.
    """
    if last.endswith(plain_end):
        return last[: len(last) - len(plain_end)]
    *_, end = [0, *(match.start() for match in known.finditer(last.rstrip()))]
    return last[:end]


def added_tokens(tokenizer: Any) -> dict[str, int]:
    """Ids by token of the tokens that a template may use as delimiters: all added tokens, special or not.

    Tokens of white space are left out: Gemma's tokenizers add some for line breaks.
    """
    tokens = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
    return {token: tokenizer.convert_tokens_to_ids(token) for token in sorted(tokens) if token.strip()}


def closing_tokens(first: str, second: str, tokens: re.Pattern[str], start: int = 0) -> list[re.Match[str]]:
    """The first tokens from `start` on, without text between them, in the longest common prefix of two texts.

    White space ends them: a template writes it after an end token, and the model does not sample it.
    """
    common = common_length(first, second)
    closing: list[re.Match[str]] = []
    for match in tokens.finditer(second, start):
        if match.end() > common or (closing and match.start() > closing[-1].end()):
            break
        closing.append(match)
    return closing


def common_length(first: str, second: str) -> int:
    """The length of the longest common prefix of two texts."""
    differing = (index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differing, min(len(first), len(second)))


def _token_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches a token; of several that begin at one place, the longest."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")
