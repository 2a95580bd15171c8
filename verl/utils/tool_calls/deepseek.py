"""DeepSeek V3, R1 and V3.1: a section of <｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>."""

from __future__ import annotations

from verl.utils.tool_calls.call import Schemas, ToolCall, between, call_of

__all__ = ["DeepSeekParser"]

_SECTION, _SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


class DeepSeekParser:
    def parse(self, text: str, schemas: Schemas = ()) -> tuple[str, list[ToolCall]]:
        said, sections = between(text, _SECTION, _SECTION_END)
        calls = (between(section, _CALL, _CALL_END)[1] for section in sections)
        return said, [_call(body) for bodies in calls for body in bodies]


def _call(body: str) -> ToolCall:
    name, found, arguments = body.partition(_SEPARATOR)
    if not found:
        return ToolCall("", body, f"Invalid tool call: it has no {_SEPARATOR} between name and arguments")
    if name.strip() == "function":  # V3 and R1 write the kind, then the name, then fenced arguments
        name, _, arguments = arguments.partition("\n")
        arguments = arguments.strip().removeprefix("```json").removesuffix("```")
    return call_of(name.strip(), arguments)
