"""GLM 4.5 and later: <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>."""

from __future__ import annotations

from verl.utils.tool_calls.call import Schemas, ToolCall, between, value_call

__all__ = ["GlmParser"]

_KEY, _VALUE = "<arg_key>", "<arg_value>"


class GlmParser:
    def parse(self, text: str, schemas: Schemas = ()) -> tuple[str, list[ToolCall]]:
        said, bodies = between(text, "<tool_call>", "</tool_call>")
        return said, [_call(body, schemas) for body in bodies]


def _call(body: str, schemas: Schemas) -> ToolCall:
    name, *pairs = body.split(_KEY)
    name, values = name.strip(), []
    for pair in pairs:
        key, found, value = pair.partition(_VALUE)
        if not found:
            why = f"write {_KEY}key</arg_key>{_VALUE}value</arg_value>"
            return ToolCall(name, body, f"Invalid pair in arguments for '{name[:64]}': {why}")
        values.append((key.partition("</arg_key>")[0].strip(), value.partition("</arg_value>")[0]))
    if not name:
        return ToolCall("", body, "Invalid tool call: it must begin with the tool's name")
    return value_call(name, values, schemas)
