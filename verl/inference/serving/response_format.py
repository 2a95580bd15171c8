"""Converts `response_format` of a request to a grammar."""

from __future__ import annotations

from typing import Any

from verl.inference.constraints import json_grammar
from verl.inference.serving.api import ApiError
from verl.inference.serving.request_models import GenerationRequest

__all__ = ["response_grammar"]

_NAME = "response_format"


def response_grammar(request: GenerationRequest) -> str | None:
    """The grammar of the response. None: any text."""
    requested = request.response_format
    if requested.type == "text":
        return None
    if request.min_tokens or request.ignore_eos:
        raise ApiError(f"{_NAME}: goes with neither min_tokens nor ignore_eos: the grammar ends the response.", _NAME)
    schema: dict[str, Any] = {"type": "object"}
    if requested.type == "json_schema":
        if requested.json_schema is None:
            raise ApiError(f'{_NAME}: should be {{"type": "json_schema", "json_schema": {{"schema": {{…}}}}}}.', _NAME)
        schema = requested.json_schema.json_schema
    try:
        return json_grammar(schema)
    except ValueError as error:
        raise ApiError(f"{_NAME}: the grammar of this schema cannot be built: {error}.", _NAME) from error
