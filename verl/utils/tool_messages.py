"""Tool calls and tool results in the form that a chat template renders."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["accepted_messages"]

Message = Mapping[str, Any]

_NAME, _ARGUMENT, _RESULT = "probe_name", "probe_argument", "probe_result"
_CALL = {"id": "call00000", "type": "function", "function": {"name": _NAME, "arguments": json.dumps({"x": _ARGUMENT})}}
_PROBE: list[Message] = [
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "name": _NAME, "content": _RESULT, "tool_call_id": "call00000"},
    {"role": "assistant", "content": "."},
]


def accepted_messages(tokenizer: Any, messages: Sequence[Message]) -> list[Message]:
    """The messages with tool calls and tool results in a form that the tokenizer's chat template renders.

    If the template rejects or omits them, calls become text of the assistant message, and results a user message.
    """
    if not any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
        return list(messages)
    if getattr(tokenizer, "chat_template", None):
        for form in (_with_objects, _with_json):
            probe = _rendered(tokenizer, form(_PROBE))
            if not all(word in probe for word in (_NAME, _ARGUMENT, _RESULT)):
                continue
            if _rendered(tokenizer, form(messages)):
                return form(messages)
    return _as_text(messages)


def _rendered(tokenizer: Any, messages: Sequence[Message]) -> str:
    """The rendered text; "" if the template rejects the messages."""
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False))
    except Exception:  # noqa: BLE001 - a template is a program: it may raise anything
        return ""


def _with_objects(messages: Sequence[Message]) -> list[Message]:
    return _with_arguments(messages, _parsed)


def _with_json(messages: Sequence[Message]) -> list[Message]:
    return _with_arguments(messages, _as_json)


def _with_arguments(messages: Sequence[Message], form: Callable[[Any], Any]) -> list[Message]:
    return [
        {**message, "tool_calls": [_formed(call, form) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _formed(call: Message, form: Callable[[Any], Any]) -> Message:
    function = call["function"]
    return {**call, "function": {**function, "arguments": form(function["arguments"])}}


def _parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _as_text(messages: Sequence[Message]) -> list[Message]:
    """Calls and results as text; consecutive results become one user message."""
    written: list[dict[str, Any]] = []
    after_tool = False
    for message in messages:
        is_tool, content = message["role"] == "tool", str(message.get("content") or "")
        if is_tool:
            content = f"<tool_response>\n{content}\n</tool_response>"
        for call in message.get("tool_calls") or ():
            function = {"name": call["function"]["name"], "arguments": _parsed(call["function"]["arguments"])}
            call_text = f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"
            content = f"{content}\n{call_text}" if content else call_text
        if is_tool and after_tool:
            written[-1]["content"] += f"\n{content}"
        else:
            written.append({"role": "user" if is_tool else message["role"], "content": content})
        after_tool = is_tool
    return list(written)
