"""Parts of the applications that serve models: /v1/models, and responses that are streamed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from verl.inference.serving.api_errors import ApiError, openai_error
from verl.inference.serving.openai_requests import ModelFacts
from verl.utils.http_server.app import create_app

__all__ = ["GeneratorResponse", "create_model_app"]


def create_model_app(
    routes: Sequence[Route], facts: ModelFacts, unfinished: Callable[[], int], max_body_bytes: int, api_key: str | None
) -> ASGIApp:
    """An application with these routes, /v1/models and /health, which reports the number of `unfinished` requests."""
    created = int(time.time())
    details = {"object": "model", "created": created, "owned_by": "verl", "max_model_len": facts.max_model_len}
    models = {name: {"id": name, **details} for name in facts.names}

    async def list_models(_request: Request) -> Response:
        return JSONResponse({"object": "list", "data": list(models.values())})

    async def get_model(request: Request) -> Response:
        name = request.path_params["name"]
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


class GeneratorResponse(StreamingResponse):
    """Sends what an asynchronous generator yields, and closes it when the client disconnects."""

    def __init__(self, pieces: AsyncGenerator[str, None], **options: Any) -> None:
        super().__init__(pieces, **options)
        self._pieces = pieces

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        # The server base watches the connection and cancels this: starlette's own task for it is not needed.
        async with contextlib.aclosing(self._pieces):
            await self.stream_response(send)
