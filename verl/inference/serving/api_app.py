"""The application that all model servers share: /v1/models and /health."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from verl.inference.serving.api_errors import ApiError, openai_error
from verl.inference.serving.openai_requests import ModelInfo
from verl.utils.http_server.app import create_app

__all__ = ["create_model_app"]


def create_model_app(
    routes: Sequence[Route],
    model_info: Callable[[], ModelInfo],
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
