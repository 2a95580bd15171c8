"""Router: one address for several servers of the same model; each request goes to the least busy one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from verl.inference.serving.api import openai_error
from verl.utils.http_server.app import HttpError, create_app, request_body

__all__ = ["Router", "least_busy"]

_MAX_BODY_BYTES = 64 * 2**20
# Characters that a request line may contain.
_TARGET = re.compile(rb"[\x21-\x7e]+")
_RESPONSE_HEADERS = ("content-type", "content-length", "cache-control", "retry-after")


class Router:
    """Forwards requests. The status for an unreachable server is 503, on which verl's clients retry."""

    def __init__(self) -> None:
        self.servers: dict[str, str] = {}
        """host:port of each server and its API key; may change at any time."""
        self._in_flight: Counter[str] = Counter()
        self._client: httpx.AsyncClient | None = None

    def app(self) -> ASGIApp:
        routes = [Route("/{path:path}", self._forward, methods=["GET", "POST"])]
        return create_app(routes, health=self._health, max_body_bytes=_MAX_BODY_BYTES, error_content=openai_error)

    def _health(self) -> dict[str, Any]:
        return {"status": "ok", "servers": len(self.servers), "unfinished_requests": self._in_flight.total()}

    async def _forward(self, request: Request) -> Response:
        if self._client is None:  # in the event loop that uses it
            self._client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None), trust_env=False)
        if not self.servers:
            raise HttpError(503, "no server has been started yet.")
        # As received: `path` is percent-decoded, and has no query; `httpx.URL` would change escapes and dots.
        target = b"?".join(part for part in (request.scope["raw_path"], request.scope["query_string"]) if part)
        if not _TARGET.fullmatch(target):
            raise HttpError(400, "the path or query contains characters that must be percent-encoded.")
        server = least_busy(list(self.servers), self._in_flight)
        headers = {
            "content-type": request.headers.get("content-type", ""),
            "authorization": f"Bearer {self.servers[server]}",
            "accept-encoding": "identity",
        }
        self._in_flight[server] += 1
        try:
            url, body = f"http://{server}/", bytes(request_body(request))
            forwarded = self._client.build_request(
                request.method, url, content=body, headers=headers, extensions={"target": target}
            )
            response = await self._client.send(forwarded, stream=True)
        except BaseException as error:
            self._in_flight[server] -= 1
            if isinstance(error, httpx.TransportError):
                raise HttpError(503, f"{server} does not respond: {error!r}") from error
            raise
        return _Forwarded(response, server, self._in_flight)


class _Forwarded(StreamingResponse):
    """The response of a server, sent as it arrives."""

    def __init__(self, response: httpx.Response, server: str, in_flight: Counter[str]) -> None:
        headers = {name: response.headers[name] for name in _RESPONSE_HEADERS if name in response.headers}
        super().__init__(response.aiter_raw(), response.status_code, headers)
        self._response, self._server, self._in_flight = response, server, in_flight

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        try:
            await self.stream_response(send)
        finally:
            self._in_flight[self._server] -= 1
            await self._response.aclose()


def least_busy(servers: Sequence[str], in_flight: Counter[str]) -> str:
    """The first server with the fewest in-flight requests."""
    return min(servers, key=lambda server: in_flight[server])
