"""Names that the gateway imports until it uses `api_errors` and the request models."""

from __future__ import annotations

from typing import Any

from verl.inference.serving.api_errors import ApiError
from verl.inference.serving.openai_requests import HeavyRequest
from verl.utils.http_server.app import HttpError
from verl.utils.http_server.json_body import parse_json

__all__ = ["ApiError", "HeavyRequest", "read_json"]


def read_json(body: bytes) -> dict[str, Any]:
    """The JSON object in a body."""
    try:
        content = parse_json(body)
    except HttpError as error:
        raise ApiError(error.message, status=error.status) from error
    if not isinstance(content, dict):
        raise ApiError("the body is not a JSON object.")
    return content
