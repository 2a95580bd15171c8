"""`response_format`: what a client says an answer must be, as a grammar."""

from __future__ import annotations

from typing import Any

from verl.inference.grammar import json_grammar
from verl.inference.serving.fields import Fields

__all__ = ["asked_grammar"]

_NAME = "response_format"
_SHAPE = '{"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}'


def asked_grammar(fields: Fields) -> str | None:
    """The grammar of the answer; None: any text."""
    asked = fields.mapping(_NAME)
    kind = asked.get("type", "text")
    if kind == "text":
        return None
    if fields.given.get("min_tokens") or fields.given.get("ignore_eos"):
        fields.refuse(_NAME, "goes with neither min_tokens nor ignore_eos: it says itself when an answer ends")
    schema: Any = {"type": "object"}
    if kind == "json_schema":
        described = asked.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if not isinstance(schema, dict):
            fields.refuse(_NAME, f"must be {_SHAPE}")
    elif kind != "json_object":
        fields.refuse(_NAME, "must have a type: text, json_object or json_schema")
    try:
        return json_grammar(schema)
    except ValueError as error:
        fields.refuse(_NAME, f"cannot be followed: {error}")
