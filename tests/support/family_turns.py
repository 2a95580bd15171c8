"""Conversations of every family in `chat_models`, turn by turn, with the expected model input.

The expected text is computed from the family's declared end tokens and the template's rendering alone.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.chat_models import FAMILIES, Family, chat_tokenizer
from verl.agent.chat import Chat, tool_message

PARAMETERS = {"properties": {"city": {"type": "string"}}, "required": ["city"], "type": "object"}
# Keys are sorted, as the gateway sorts them.
TOOLS = [{"function": {"description": "Today.", "name": "weather", "parameters": PARAMETERS}, "type": "function"}]
USER = [{"role": "user", "content": "And now?"}]
TOOL = [tool_message("weather", "5 °C")]
BOTH = [tool_message("weather", "cold"), tool_message("weather", "5 °C", 1)]


@dataclass(frozen=True)
class Case:
    """One family with or without tools and thinking, all turns ended by `end` (None: truncated)."""

    family: str
    tools: bool
    thinking: str | None
    end: str | None

    def __str__(self) -> str:
        tools = "tools" if self.tools else "plain"
        return "-".join([self.family, tools, *([f"think_{self.thinking}"] if self.thinking else []), self.end or "cut"])


def all_cases() -> list[Case]:
    """Family × tools × thinking × every end token, and a truncated turn."""
    return [
        Case(name, tools, thinking, end)
        for name, family in FAMILIES.items()
        for tools in (False, True)
        for thinking in family.thinking or (None,)
        for end in (None, *family.stops)
    ]


@functools.cache
def family_chat(family: str, tools: bool, thinking: str | None) -> Chat:
    """The Chat as a loop worker builds it, with the end tokens of the model's generation config."""
    tokenizer, kind = chat_tokenizer(family), FAMILIES[family]
    stops = tokenizer.convert_tokens_to_ids(kind.stops)
    return Chat(tokenizer, TOOLS if tools else None, stops, **template_kwargs(family, thinking))


def template_kwargs(family: str, thinking: str | None) -> dict[str, Any]:
    switchable = "off" in FAMILIES[family].thinking
    return {"enable_thinking": thinking == "on"} if switchable else {}


class Conversation:
    """Renders a family's conversation; `text` is the model input so far."""

    def __init__(self, case: Case) -> None:
        self.case, self.kind = case, FAMILIES[case.family]
        self.tokenizer = chat_tokenizer(case.family)
        self.messages: list[Any] = [{"role": "system", "content": "Be brief."}] if self.kind.system else []
        self.messages.append({"role": "user", "content": "How warm is it?"})
        self.text = self.rendered = self.render(True)
        self.rewritten = False

    def render(self, generation_prompt: bool, *more: Any) -> str:
        return self.tokenizer.apply_chat_template(
            [*self.messages, *more],
            tools=TOOLS if self.case.tools else None,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **template_kwargs(self.case.family, self.case.thinking),
        )

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def model_turn(self, number: int, replies: Sequence[Any]) -> tuple[str, str, Any]:
        """The model's turn as text without its end token, the last words of its content, and the message."""
        content = f"Fine {number}."
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self.case.thinking == "on" and self.case.family == "gpt_oss":
            message["thinking"] = f"Hm {number}."
        elif self.case.thinking == "on" and self.case.family != "deepseek_r1":
            message["content"] = f"<think>\nHm {number}.\n</think>\n\n{content}"
        if replies[0]["role"] == "tool" and self.kind.calls:
            content = f"{content[:-1]} city"
            message["tool_calls"] = [self._call(reply, content) for reply in replies]
        return self.turn(message, number), content, message

    def _call(self, reply: Any, city: str) -> dict[str, Any]:
        arguments: Any = {"city": city}
        if self.case.family.startswith("deepseek"):
            arguments = json.dumps(arguments)
        return {
            "id": reply["tool_call_id"],
            "type": "function",
            "function": {"name": "weather", "arguments": arguments},
        }

    def turn(self, message: Any, number: int) -> str:
        """The text of the last assistant turn as the model samples it, without its end token."""
        before, text = self.render(True), self.render(False, message)
        opened = "<think>\n" if before.endswith("<think>\n") and self.case.thinking == "on" else ""
        start = before.removesuffix(opened)
        if text.startswith(start):
            turn = text[len(start) :]
        else:  # the template rewrites the conversation before the assistant turn
            prompt = before.removeprefix(self.render(False))
            turn = text.rpartition(prompt)[2]
        ends = [index for stop in self.kind.stops if (index := turn.find(stop)) >= 0]
        turn = turn[: min(ends)] if ends else turn.removesuffix(self.kind.separator)
        return (f"Hm {number}.\n</think>\n\n" if opened else "") + turn

    def add(self, turn: str, last_words: str, message: Any, replies: Sequence[Any], end: str | None) -> str:
        """Append the turn, its end token and the replies; return the text that the environment adds."""
        after = self.render(True, message, *replies)
        tail = after.rpartition(last_words)[2]
        closing = turn.rpartition(last_words)[2]
        assert tail.startswith(closing)
        tail = tail[len(closing) :]
        template_end = self.template_end(message)
        if template_end is not None:
            index = tail.index(template_end)
            tail = tail[index if end is None else index + len(template_end) :]
        elif end is not None and tail.startswith(end):
            tail = tail[len(end) :]
        self.text += turn + (end or "") + tail
        self.rewritten |= not after.startswith(self.rendered + turn)
        self.rendered = after
        self.messages += [message, *replies]
        return tail

    def template_end(self, message: Any) -> str | None:
        """The end token that the template writes after this turn."""
        called = "tool_calls" in message
        return self.kind.call_end if called and self.kind.call_end else self.kind.end


def rounds_of(case: Case, kind: Family) -> list[list[dict[str, Any]]]:
    if not case.tools:
        return [USER, USER]
    return [TOOL, BOTH, USER, USER] if kind.several_calls and kind.calls else [TOOL, TOOL, USER, USER]
