"""Gemma 4 and FunctionGemma: call:name{key:value}, keys bare, texts between marks of their own.

Gemma 4 writes <|tool_call>call:f{city:<|"|>Bonn<|"|>,days:3}<tool_call|>, FunctionGemma the same with <escape> around
texts and <start_function_call>, <end_function_call> around calls.
"""

from __future__ import annotations

import json
import re

from verl.utils.tool_calls.call import Schemas, ToolCall, between, call_of

__all__ = ["GemmaParser"]

_MARKS = (("<|tool_call>", "<tool_call|>", '<|"|>'), ("<start_function_call>", "<end_function_call>", "<escape>"))
_KEY = re.compile(r'([{,]\s*)([^\s{}\[\],:"]+)\s*:')


class GemmaParser:
    def parse(self, text: str, schemas: Schemas = ()) -> tuple[str, list[ToolCall]]:
        start, end, quote = next((marks for marks in _MARKS if marks[0] in text), _MARKS[0])
        said, bodies = between(text, start, end)
        return said, [_call(body, quote) for body in bodies]


def _call(body: str, quote: str) -> ToolCall:
    head, brace, rest = body.strip().partition("{")
    kind, _, name = head.partition(":")
    if kind.strip() != "call" or not brace:
        return ToolCall(name.strip(), body, "Invalid tool call: it must be call:name{key:value}")
    # Texts and what is between them take turns.
    parts = (brace + rest).split(quote)
    written = [json.dumps(part) if place % 2 else _KEY.sub(r'\1"\2":', part) for place, part in enumerate(parts)]
    return call_of(name.strip(), "".join(written))
