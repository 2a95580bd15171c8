"""Qwen3-Coder: <tool_call><function=name><parameter=key>value</parameter></function></tool_call>, one line each."""

from __future__ import annotations

from verl.utils.tool_calls.call import Schemas, ToolCall, between, value_call

__all__ = ["Qwen3CoderParser"]

_FUNCTION, _PARAMETER = "<function=", "<parameter="


class Qwen3CoderParser:
    def parse(self, text: str, schemas: Schemas = ()) -> tuple[str, list[ToolCall]]:
        said, bodies = between(text, "<tool_call>", "</tool_call>")
        return said, [_call(body, schemas) for body in bodies]


def _call(body: str, schemas: Schemas) -> ToolCall:
    before, found, rest = body.partition(_FUNCTION)
    name, closed, written = rest.partition(">")
    if before.strip() or not found or not closed:
        return ToolCall("", body, "Invalid tool call: it must be <function=name> with a <parameter=key> for each value")
    values = []
    for part in written.partition("</function>")[0].split(_PARAMETER)[1:]:
        key, closed, value = part.partition(">")
        if not closed:
            return ToolCall(name, body, f"Invalid parameter in arguments for '{name[:64]}': write <parameter=key>value")
        values.append((key.strip(), _line(value.partition("</parameter>")[0])))
    return value_call(name.strip(), values, schemas)


def _line(value: str) -> str:
    """Without the line breaks that set the value off from its tags."""
    return value.removeprefix("\n").removesuffix("\n")
