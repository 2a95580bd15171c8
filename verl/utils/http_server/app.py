"""Requests of all HTTP servers: starlette applications with limits, authentication, errors, health, cancellation."""

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
_BODY = "verl.body"  # key of the scope
_SMALL_BODY = 1 << 20
_BUFFERED_BODIES = 512 << 20
_PIECE, _PIECE_ITEMS = 256 << 10, 4096

logger = logging.getLogger(__name__)


class ClientDisconnected(Exception):
    """The client closed the connection before its response was complete."""


class HttpError(PicklableError):
    """A request that is rejected: `status`, and for some dialects the parameter at fault and a code."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


ErrorContent = Callable[[str, HttpError], Mapping[str, Any]]
"""(path, error) -> the JSON body of the response, in the dialect of the clients of that path."""


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

    Handlers are starlette endpoints. They raise HttpError, get a body of at most `max_body_bytes`, which was received
    completely, with `request_body`, and are cancelled when the client disconnects. With `api_key`, every request except
    /health must send it (`Authorization: Bearer`, basic authentication's password, `x-api-key`).
    """
    guard = _Guard(routes, health, max_body_bytes, api_key, error_content)
    handlers: Any = {kind: guard.handle_error for kind in (HTTPException, HttpError, Exception)}
    guard.app = Starlette(routes=list(routes), exception_handlers=handlers)
    guard.app.router.redirect_slashes = False
    return guard


def request_body(request: Request) -> bytes | bytearray:
    """The body. Not copied, unlike `request.body()`: that takes 2 ms per megabyte, in which no client is served."""
    body: bytes | bytearray = request.scope[_BODY]
    return body


class _Guard:
    """What happens around every request."""

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
        self._available = ", ".join(["GET /health", *map(_described, routes)])
        self._buffered = 0

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
        except (
            Exception
        ):  # starlette has sent status 500, or the response was incomplete: uvicorn closes the connection
            logger.exception("%s %s failed", scope["method"], scope["path"])

    async def handle_error(self, request: Request, error: Exception) -> Response:
        """The response to an exception of a handler; the message of an unexpected one is only logged."""
        if isinstance(error, HTTPException):
            path = request.scope["path"][:200]
            message = f"there is no {request.method} {path}. Available: {self._available}."
            error = HttpError(error.status_code, message)
        elif not isinstance(error, HttpError):
            error = HttpError(500, "the server failed; the cause is in its log.")
        return self._error_response(request.scope, error)

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
            return await run_until_disconnect(self.app({**scope, _BODY: b""}, _replay(b""), send), receive)
        body = await self._read_body(headers, receive)
        size = len(body)
        try:
            if body or scope["method"] != "DELETE":
                _check_content_type(headers.get("content-type", ""))
            await run_until_disconnect(self.app({**scope, _BODY: body}, _replay(body), send), receive)
        finally:
            del body
            self._count(-size)

    def _count(self, size: int) -> None:
        """Bodies above _SMALL_BODY share a budget; smaller ones are limited by the number of connections."""
        self._buffered += size if abs(size) > _SMALL_BODY else 0

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
        """Return the body, counted in `_buffered`. A body that is too large is received but not stored."""
        length, body, more = _content_length(headers), bytearray(), True
        if length > self._max_body and "expect" in headers:
            raise self._too_large()
        rejection: HttpError | None = None
        try:
            # Clients that are still sending do not read the response: receive everything before it is sent.
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                chunk = message.get("body", b"")
                length, size = max(length, len(body) + len(chunk)), len(body)
                rejection = rejection or self._rejection(length, size + len(chunk), size)
                self._count(-size)
                if rejection is None:
                    body += chunk
                else:
                    body.clear()
                self._count(len(body))
                more = message.get("more_body", False)
            if rejection is not None:
                raise rejection
            return body if len(body) > _SMALL_BODY else bytes(body)
        except BaseException:
            self._count(-len(body))
            raise

    def _rejection(self, length: int, size: int, counted: int) -> HttpError | None:
        """`size`: of the body with the next piece; `counted`: without it."""
        if length > self._max_body:
            return self._too_large()
        others = self._buffered - (counted if counted > _SMALL_BODY else 0)
        if size > _SMALL_BODY and others + size > max(_BUFFERED_BODIES, self._max_body):
            return HttpError(503, "the server is receiving too many large requests at the same time. Try again later.")
        return None

    def _too_large(self) -> HttpError:
        return HttpError(413, f"the body is larger than {self._max_body} bytes (--max-body-mb).")


def _check_host(scope: Scope, headers: Headers) -> None:
    """Reject requests to a loopback address under a foreign host name.

    A web page whose DNS name is changed to 127.0.0.1 could otherwise use this server through the user's browser.
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
    # A web page in a browser on this machine can send a form to this address, but not JSON.
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise HttpError(415, f"Content-Type is {content_type[:200]!r}. Send the request as application/json.")


def _described(route: BaseRoute) -> str:
    methods = sorted(set(getattr(route, "methods", None) or ()) - {"HEAD"})
    return f"{' '.join(methods)} {getattr(route, 'path', route)}"


def _replay(body: bytes | bytearray) -> Receive:
    """A `receive` that returns the body once and then waits: `run_until_disconnect` watches the connection."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.get_running_loop().create_future()
        raise AssertionError("unreachable")

    return receive


async def run_until_disconnect(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run `work`; cancel it and raise ClientDisconnected when the client disconnects first."""
    task, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)
    if task.cancelled():
        raise ClientDisconnected
    task.result()


async def _disconnected(receive: Receive) -> None:
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
    """A response whose body may be large: `size` is an estimate in bytes.

    A large one is encoded and sent in pieces, so that other clients are served.
    """
    if size <= _PIECE:
        return JSONResponse(build())
    return StreamingResponse(_encoded(build()), media_type="application/json")


async def _encoded(content: Any) -> AsyncIterator[bytes]:
    pieces, size = [], 0
    for piece in json_pieces(content):
        pieces.append(piece)
        size += len(piece)
        if size > _PIECE:
            yield "".join(pieces).encode()
            pieces, size = [], 0
        await asyncio.sleep(0)
    yield "".join(pieces).encode()


def json_pieces(content: Any) -> Iterator[str]:
    """The JSON of `content` in pieces that each take a few milliseconds: `json.dumps` holds the interpreter's lock."""
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
    elif isinstance(content, str) and len(content) > _PIECE:
        yield '"'
        for start in range(0, len(content), _PIECE):
            yield _dumps(content[start : start + _PIECE])[1:-1]
        yield '"'
    else:
        yield _dumps(content)


def _dumps(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False)
