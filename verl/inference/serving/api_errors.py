"""Errors of the OpenAI API: the exception that handlers raise, and its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.utils.http_server.app import HttpError

__all__ = ["ApiError", "openai_error"]

_TYPES = {401: "authentication_error", 404: "not_found_error"}


class ApiError(HttpError):
    """A rejected request; `param` is the field at fault."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(status, message, param=param, code=code)

    @property
    def content(self) -> Mapping[str, Any]:
        """The JSON body of the response, or of the event that ends a stream."""
        return openai_error("", self)


def openai_error(_path: str, error: HttpError) -> Mapping[str, Any]:
    """The `error_content` (see `create_app`) of servers with the OpenAI API."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}
