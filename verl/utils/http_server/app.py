"""Base ASGI application of all HTTP servers: body limits, authentication, error responses, /health, cancellation."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import functools
import hmac
import ipaddress
import json
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from verl.utils.exceptions import PicklableError

__all__ = [
    "ClientDisconnected",
    "ErrorContent",
    "GeneratorResponse",
    "HttpError",
    "create_app",
    "detail_error",
    "json_pieces",
    "json_response",
    "request_body",
]

_BODY_METHODS = ("POST", "PUT", "PATCH", "DELETE")
_BODY_KEY = "verl.body"  # of the received body in the ASGI scope
# Larger bodies share the budget; smaller ones are limited by the number of connections.
_SMALL_BODY_BYTES = 1 << 20
# Total size of the large bodies that are received or handled at the same time.
BUFFER_BUDGET_BYTES = 512 << 20
# Responses are encoded in pieces of at most this many characters or list items.
_PIECE_CHARS, _PIECE_ITEMS = 256 << 10, 4096

logger = logging.getLogger(__name__)


class ClientDisconnected(Exception):
    """The client closed the connection before its response was complete."""


class HttpError(PicklableError):
    """A rejected request: the HTTP status and, for error formats that have them, the invalid parameter and a code."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


ErrorContent = Callable[[str, HttpError], Mapping[str, Any]]
"""(path, error) -> the JSON body of the response, in the error format that clients of that path expect."""


def detail_error(_path: str, error: HttpError) -> Mapping[str, Any]:
    return {"detail": error.message}


def create_app(
    routes: Sequence[BaseRoute],
    *,
    health: Callable[[], Mapping[str, Any]],
    max_body_bytes: int,
    api_key: str | None = None,
    error_content: ErrorContent = detail_error,
) -> ASGIApp:
    """Return an ASGI application that serves `routes` and `GET /health`.

    Handlers are starlette endpoints. The body (at most `max_body_bytes`) is received before a handler is called; it is
    read with `request_body`. Handlers may raise HttpError, and are cancelled when the client disconnects. With
    `api_key`, every request except /health must send it (`Authorization: Bearer`, basic authentication's password,
    `x-api-key`).
    """
    middleware = _RequestMiddleware(routes, health, max_body_bytes, api_key, error_content)
    handlers: Any = {kind: middleware.handle_error for kind in (HTTPException, HttpError, Exception)}
    middleware.app = Starlette(routes=list(routes), exception_handlers=handlers)
    middleware.app.router.redirect_slashes = False
    return middleware


def request_body(request: Request) -> bytes | bytearray:
    """Return the body without a copy. `request.body()` copies it, which blocks the event loop for 2 ms per megabyte."""
    body: bytes | bytearray = request.scope[_BODY_KEY]
    return body


class _RequestMiddleware:
    """ASGI middleware: serves /health, checks host and API key, receives bodies, converts exceptions to responses."""

    app: Starlette

    def __init__(
        self,
        routes: Sequence[BaseRoute],
        health: Callable[[], Mapping[str, Any]],
        max_body_bytes: int,
        api_key: str | None,
        error_content: ErrorContent,
    ) -> None:
        self._health, self._error_content = health, error_content
        self._max_body, self._api_key = max_body_bytes, api_key
        self._available = ", ".join(["GET /health", *map(_describe_route, routes)])
        self.buffered_bytes = 0  # of large bodies, see `BUFFER_BUDGET_BYTES`

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["path"] = scope["path"].rstrip("/") or "/"
        try:
            await self._respond(scope, receive, send)
        except ClientDisconnected:
            return
        except asyncio.CancelledError:
            logger.info("%s %s was cancelled: the server is stopping", scope["method"], scope["path"])
        except HttpError as error:  # raised here; those of handlers are handled by starlette
            await self._error_response(scope, error)(scope, receive, send)
        except Exception:
            # Starlette has sent status 500; or the response was incomplete, and uvicorn closes the connection.
            logger.exception("%s %s failed", scope["method"], scope["path"])

    async def handle_error(self, request: Request, error: Exception) -> Response:
        """Return the response to an exception of starlette or of a handler.

        The message of an unexpected exception is logged, but not sent.
        """
        if isinstance(error, HTTPException):
            error = HttpError(error.status_code, self._routing_message(request, error))
        elif not isinstance(error, HttpError):
            error = HttpError(500, "the server failed; the cause is in its log.")
        return self._error_response(request.scope, error)

    def _routing_message(self, request: Request, error: HTTPException) -> str:
        path = request.scope["path"][:200]
        if error.status_code == 404:
            return f"there is no {request.method} {path}. Available: {self._available}."
        if error.status_code == 405:
            return f"method not allowed: {request.method} {path}. Available: {self._available}."
        return error.detail

    def _error_response(self, scope: Scope, error: HttpError) -> Response:
        headers = {"Retry-After": "1"} if error.status == 503 else None
        return JSONResponse(self._error_content(scope["path"], error), error.status, headers)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/health" and scope["method"] == "GET":
            return await JSONResponse(self._health())(scope, receive, send)
        headers = Headers(scope=scope)
        if self._api_key is None:
            _check_host(scope, headers)
        self._authenticate(headers)
        if scope["method"] not in _BODY_METHODS:
            return await run_until_disconnect(self.app({**scope, _BODY_KEY: b""}, _replay(b""), send), receive)
        body = await self._read_body(headers, receive)
        size = len(body)
        try:
            if body or scope["method"] != "DELETE":
                _check_content_type(headers.get("content-type", ""))
            await run_until_disconnect(self.app({**scope, _BODY_KEY: body}, _replay(body), send), receive)
        finally:
            del body
            self._adjust_buffered(size, 0)

    def _adjust_buffered(self, current_size: int, new_size: int) -> None:
        """Record that the size of a buffered body has changed."""
        self.buffered_bytes += _budgeted(new_size) - _budgeted(current_size)

    def _authenticate(self, headers: Headers) -> None:
        if self._api_key is None:
            return
        kind, _, credentials = headers.get("authorization", "").partition(" ")
        if kind.lower() == "basic":
            try:
                credentials = base64.b64decode(credentials, validate=True).decode(errors="replace").partition(":")[2]
            except binascii.Error:
                credentials = ""
        sent_key = headers.get("x-api-key") or (credentials.strip() if kind.lower() in ("basic", "bearer") else "")
        if not hmac.compare_digest(sent_key.encode(), self._api_key.encode()):
            raise HttpError(401, "Incorrect API key provided.", code="invalid_api_key")

    async def _read_body(self, headers: Headers, receive: Receive) -> bytes | bytearray:
        """Return the body, counted in `buffered_bytes`. A body that is too large is received but not stored."""
        expected_size = _content_length(headers)
        if expected_size > self._max_body and "expect" in headers:  # the client waits for this before it sends the body
            raise self._too_large()
        body, more = bytearray(), True
        rejection: HttpError | None = None
        try:
            # Clients that are still sending do not read the response: receive everything before it is sent.
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                chunk = message.get("body", b"")
                current_size, new_size = len(body), len(body) + len(chunk)
                expected_size = max(expected_size, new_size)
                rejection = rejection or self._rejection(expected_size, current_size, new_size)
                if rejection is None:
                    body += chunk
                else:
                    body.clear()
                self._adjust_buffered(current_size, len(body))
                more = message.get("more_body", False)
            if rejection is not None:
                raise rejection
            return body if len(body) > _SMALL_BODY_BYTES else bytes(body)
        except BaseException:
            self._adjust_buffered(len(body), 0)
            raise

    def _rejection(self, expected_size: int, current_size: int, new_size: int) -> HttpError | None:
        """Return the error if a body must not grow from `current_size` to `new_size`, because it would be too large or
        exceed the budget of all bodies; None: it may grow. `expected_size`: its final size, as far as known."""
        if expected_size > self._max_body:
            return self._too_large()
        other_bodies = self.buffered_bytes - _budgeted(current_size)
        if new_size > _SMALL_BODY_BYTES and other_bodies + new_size > max(BUFFER_BUDGET_BYTES, self._max_body):
            return HttpError(503, "the server is receiving too many large requests at the same time. Try again later.")
        return None

    def _too_large(self) -> HttpError:
        return HttpError(413, f"the body is larger than {self._max_body} bytes (--max-body-mb).")


def _budgeted(size: int) -> int:
    """Return the bytes of a body that count for the budget."""
    return size if size > _SMALL_BODY_BYTES else 0


def _check_host(scope: Scope, headers: Headers) -> None:
    """Protect against DNS rebinding: reject requests to a loopback address with an unknown Host header.

    Otherwise a web page whose DNS name is changed to 127.0.0.1 could use this server through the user's browser.
    """
    address, host = (scope.get("server") or ("",))[0], _host_name(headers.get("host", ""))
    if _is_ip(address, loopback=True) and host and not (_is_ip(host) or host in _own_names()):
        raise HttpError(403, f"the host name {host[:200]!r} is not this machine's. Use 127.0.0.1, or set --api-key.")


def _host_name(host: str) -> str:
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().rstrip(".")


@functools.lru_cache(256)
def _is_ip(name: str, loopback: bool = False) -> bool:
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return address.is_loopback or not loopback


@functools.cache
def _own_names() -> frozenset[str]:
    name = socket.gethostname().lower()
    return frozenset({"localhost", name, name.partition(".")[0]})


def _content_length(headers: Headers) -> int:
    value = headers.get("content-length", "0")
    if not value.isdecimal() or len(value) > 18:
        raise HttpError(400, "Content-Length is not a number of bytes.")
    return int(value)


def _check_content_type(content_type: str) -> None:
    # Protects against CSRF: a web page in a browser on this machine can send a form to this address, but not JSON.
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise HttpError(415, f"Content-Type is {content_type[:200]!r}. Send the request as application/json.")


def _describe_route(route: BaseRoute) -> str:
    methods = sorted(set(getattr(route, "methods", None) or ()) - {"HEAD"})
    return f"{' '.join(methods)} {getattr(route, 'path', route)}"


def _replay(body: bytes | bytearray) -> Receive:
    """Return an ASGI `receive` that returns the body once and then waits forever.

    It reports no disconnect: `run_until_disconnect` watches the connection.
    """
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.get_running_loop().create_future()
        raise AssertionError("unreachable")

    return receive


async def run_until_disconnect(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run `work`; cancel it and raise ClientDisconnected when the client disconnects first."""
    task, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)
    if task.cancelled():
        raise ClientDisconnected
    task.result()


async def _wait_for_disconnect(receive: Receive) -> None:
    """Return when the client disconnects; the body of a GET is ignored."""
    while (await receive())["type"] != "http.disconnect":
        pass


class GeneratorResponse(StreamingResponse):
    """Sends the pieces that a generator yields. Closes the generator at the end, also if the client disconnects."""

    def __init__(self, pieces: AsyncGenerator[str, None], **options: Any) -> None:
        super().__init__(pieces, **options)
        self._pieces = pieces

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        # `run_until_disconnect` watches the connection and cancels this call: starlette's task for it is not needed.
        async def send_and_yield(message: Message) -> None:
            await send(message)
            if message.get("more_body"):
                await asyncio.sleep(0)  # serve other clients between two pieces, however many are ready

        async with contextlib.aclosing(self._pieces):
            await self.stream_response(send_and_yield)


async def json_response(build: Callable[[], Any], size: int) -> Response:
    """Return the response with the JSON of `build()`. `size`: estimate of its size in bytes.

    A large body is encoded and sent in pieces, so that other clients are served meanwhile.
    """
    if size <= _PIECE_CHARS:
        return JSONResponse(build())
    return StreamingResponse(_encode_json(build()), media_type="application/json")


async def _encode_json(content: Any) -> AsyncIterator[bytes]:
    pieces, size = [], 0
    for piece in json_pieces(content):
        pieces.append(piece)
        size += len(piece)
        if size > _PIECE_CHARS:
            yield "".join(pieces).encode()
            pieces, size = [], 0
        await asyncio.sleep(0)
    yield "".join(pieces).encode()


def json_pieces(content: Any) -> Iterator[str]:
    """Yield the JSON of `content` in pieces that each take a few milliseconds: `json.dumps` holds the GIL."""
    if isinstance(content, dict) and content:
        for number, (name, value) in enumerate(content.items()):
            yield f"{', ' if number else '{'}{_dumps(str(name))}: "
            yield from json_pieces(value)
        yield "}"
    elif isinstance(content, list | tuple) and content:
        for start in range(0, len(content), _PIECE_ITEMS):
            items = content[start : start + _PIECE_ITEMS]
            yield ", " if start else "["
            if any(isinstance(item, dict | list | tuple | str) for item in items):
                for number, item in enumerate(items):
                    yield ", " if number else ""
                    yield from json_pieces(item)
            else:
                yield _dumps(list(items))[1:-1]
        yield "]"
    elif isinstance(content, str) and len(content) > _PIECE_CHARS:
        yield '"'
        for start in range(0, len(content), _PIECE_CHARS):
            yield _dumps(content[start : start + _PIECE_CHARS])[1:-1]
        yield '"'
    else:
        yield _dumps(content)


def _dumps(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False)
