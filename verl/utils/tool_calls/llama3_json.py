"""Llama 3: the answer is {"name": …, "parameters": {…}}, or so after <|python_tag|>; several have ; between them."""

from __future__ import annotations

import json

from verl.utils.tool_calls.call import Schemas, ToolCall, json_call

__all__ = ["Llama3JsonParser"]

_TAG = "<|python_tag|>"


class Llama3JsonParser:
    def parse(self, text: str, schemas: Schemas = ()) -> tuple[str, list[ToolCall]]:
        said, tagged, written = text.partition(_TAG)
        if not tagged:
            said, written = "", text
        written = written.strip()
        # Without the tag, an object that names no tool is an answer in JSON.
        if not tagged and not (written.startswith("{") and '"name"' in written):
            return text, []
        return said, [json_call(part) for part in _objects(written)]


def _objects(text: str) -> list[str]:
    """The JSON objects one after the other; what cannot be read is one piece to the end."""
    decoder, parts, at = json.JSONDecoder(), [], 0
    while at < len(text):
        try:
            end = decoder.raw_decode(text, at)[1]
        except (ValueError, RecursionError):
            end = len(text)
        parts.append(text[at:end])
        while end < len(text) and text[end] in "; \n\t,":
            end += 1
        at = end
    return parts
