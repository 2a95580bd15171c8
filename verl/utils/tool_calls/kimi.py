"""Kimi K2: a section of <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>."""

from __future__ import annotations

from verl.utils.tool_calls.call import Schemas, ToolCall, between, call_of

__all__ = ["KimiParser"]

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"


class KimiParser:
    def parse(self, text: str, schemas: Schemas = ()) -> tuple[str, list[ToolCall]]:
        said, sections = between(text, _SECTION, _SECTION_END)
        calls = (between(section, _CALL, _CALL_END)[1] for section in sections)
        return said, [_call(body) for bodies in calls for body in bodies]


def _call(body: str) -> ToolCall:
    name, found, arguments = body.partition("<|tool_call_argument_begin|>")
    name = name.strip().removeprefix("functions.").partition(":")[0]
    if not found:
        return ToolCall(name, body, f"Invalid tool call of '{name[:64]}': it has no <|tool_call_argument_begin|>")
    return call_of(name, arguments)
