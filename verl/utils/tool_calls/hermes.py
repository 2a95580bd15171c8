"""Hermes, Qwen 2.5 and Qwen 3: <tool_call>{"name": …, "arguments": {…}}</tool_call>, one after the other."""

from __future__ import annotations

from verl.utils.tool_calls.call import Schemas, ToolCall, between, json_call

__all__ = ["CLOSE", "OPEN", "HermesParser"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    def parse(self, text: str, schemas: Schemas = ()) -> tuple[str, list[ToolCall]]:
        said, bodies = between(text, OPEN, CLOSE)
        return said, [json_call(body) for body in bodies]
