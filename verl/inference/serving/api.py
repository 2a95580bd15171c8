"""The part of the OpenAI API that all model servers share: errors, /v1/models and /health."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from verl.utils.http_server.app import HttpError, create_app

__all__ = ["ApiError", "create_model_app", "openai_error"]

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


class ServedModel(Protocol):
    """The part of `ModelInfo` that /v1/models shows."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def max_model_len(self) -> int: ...


def create_model_app(
    routes: Sequence[Route],
    model_info: Callable[[], ServedModel],
    unfinished: Callable[[], int],
    max_body_bytes: int,
    api_key: str | None,
) -> ASGIApp:
    """An application with these routes, /v1/models and /health, which reports the number of `unfinished` requests.

    `model_info` returns the names that clients may use now.
    """
    created = int(time.time())

    def list_info() -> dict[str, dict[str, Any]]:
        info = model_info()
        details = {"object": "model", "created": created, "owned_by": "verl", "max_model_len": info.max_model_len}
        return {name: {"id": name, **details} for name in info.names}

    async def list_models(_request: Request) -> Response:
        return JSONResponse({"object": "list", "data": list(list_info().values())})

    async def get_model(request: Request) -> Response:
        name, models = request.path_params["name"], list_info()
        if name not in models:
            raise ApiError(f"The model {name[:200]!r} does not exist.", "model", 404, "model_not_found")
        return JSONResponse(models[name])

    return create_app(
        [*routes, Route("/v1/models", list_models), Route("/v1/models/{name:path}", get_model)],
        health=lambda: {"status": "ok", "unfinished_requests": unfinished()},
        max_body_bytes=max_body_bytes,
        api_key=api_key,
        error_content=openai_error,
    )
