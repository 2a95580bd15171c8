"""What all model servers share: errors, /v1/models and /health of the OpenAI API; example request and activity log."""

from __future__ import annotations

import json
import logging
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from verl.utils.http_server.app import HttpError, create_app

__all__ = ["ActivityLog", "ApiError", "activity_line", "create_model_app", "example_request", "openai_error"]

logger = logging.getLogger(__name__)

ACTIVITY_INTERVAL_S = 10.0
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


def example_request(model: str, has_template: bool | None, needs_key: bool, url: str) -> str:
    """Return a curl command for the server at `url` (`http://host:port/v1`).

    `has_template`: whether the model has a chat template; None: it is a classifier.
    """
    question = "What is 2 + 2?"
    body: dict[str, object]
    if has_template is None:
        path, body = "/classify", {"input": f"{question} 4"}
    elif has_template:
        path, body = "/chat/completions", {"messages": [{"role": "user", "content": question}]}
    else:
        path, body = "/completions", {"prompt": question}
    text = json.dumps({"model": model, **body})
    key = ' -H "Authorization: Bearer $VERL_API_KEY"' if needs_key else ""
    return f"curl -s {url}{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(text)}"


def activity_line(requests: int, tokens: int, unfinished: int, seconds: float) -> str:
    """Return one line for the requests and generated tokens of the last `seconds`."""
    speed = f", {tokens / seconds:.0f} tokens/s" if tokens else ""
    return f"{requests} requests in {seconds:.0f} s ({requests / seconds:.3g}/s){speed}, {unfinished} unfinished"


class ActivityLog:
    """An application that counts POST requests. As a context, it logs a line every ten seconds in which requests
    arrived or tokens were generated."""

    def __init__(self, app: ASGIApp, tokens: Callable[[], int], unfinished: Callable[[], int]) -> None:
        """`tokens()`: generated so far. `unfinished()`: requests in progress. Both are called from a thread."""
        self._app, self._tokens, self._unfinished = app, tokens, unfinished
        self.requests = 0
        self._stopped = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            self.requests += 1
        await self._app(scope, receive, send)

    def __enter__(self) -> ActivityLog:
        threading.Thread(target=self._run, name="activity", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()

    def _run(self) -> None:
        before = self.requests, self._tokens()
        while not self._stopped.wait(ACTIVITY_INTERVAL_S):
            now = self.requests, self._tokens()
            if now != before:
                requests, tokens = now[0] - before[0], now[1] - before[1]
                logger.info("%s", activity_line(requests, tokens, self._unfinished(), ACTIVITY_INTERVAL_S))
            before = now
