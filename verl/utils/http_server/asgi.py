"""ASGI in the few words that our servers need: bodies with a limit, answers, clients that leave, routes of JSON."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from verl.utils.exceptions import Travels

__all__ = ["Gone", "HttpError", "JsonApp", "Response", "headers_of", "read_body", "while_there"]

JSON = b"application/json"
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Handler = Callable[[Any], Coroutine[Any, Any, Any]]

logger = logging.getLogger(__name__)


class Gone(Exception):
    """The client has left."""


class HttpError(Travels):
    """A request that is refused, and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class JsonApp:
    """Answers `(method, path)` with what the route's handler returns for the request's JSON (None for a GET).

    A handler refuses with an HttpError, is cancelled when its client leaves, and fails with status 500.
    """

    def __init__(self, routes: Mapping[tuple[str, str], Handler], max_body: int) -> None:
        self._routes, self._max_body = dict(routes), max_body

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"].rstrip("/")
        response = Response(send)
        try:
            handler = self._handler(method, path)
            given = await self._given(headers_of(scope), receive) if method == "POST" else None
            await while_there(_answer(handler, given, response), receive)
        except Gone:
            return
        except HttpError as error:
            await response.whole(error.status, {"detail": str(error)})
        except asyncio.CancelledError:
            logger.info("a request was cut off: the server stops")
        except Exception:
            logger.exception("%s %s failed", method, path)
            if response.begun:
                raise
            await response.whole(500, {"detail": "the server failed; its log says how."})

    def _handler(self, method: str, path: str) -> Handler:
        handler = self._routes.get((method, path))
        if handler is None:
            known = ", ".join(f"{verb} {place}" for verb, place in self._routes)
            status = 405 if any(place == path for _, place in self._routes) else 404
            raise HttpError(status, f"there is no {method} {path}. There are {known}.")
        return handler

    async def _given(self, headers: Mapping[str, str], receive: Receive) -> Any:
        too_large = HttpError(413, f"the body is larger than {self._max_body} bytes.")
        body = await read_body(headers, receive, self._max_body, too_large)
        # A page in somebody's browser can send a form to this address, but not JSON.
        kind = headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            raise HttpError(415, f"Content-Type is {kind!r}. Send the request as application/json.")
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise HttpError(400, f"the body is no JSON: {error}.") from error


async def _answer(handler: Handler, given: Any, response: Response) -> None:
    await response.whole(200, await handler(given))


def headers_of(scope: Mapping[str, Any]) -> dict[str, str]:
    """The headers of a request; their names are in lower case."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


async def read_body(headers: Mapping[str, str], receive: Receive, most: int, too_large: Exception) -> bytes:
    """The body of a request; one of more than `most` bytes raises `too_large`."""
    length, body, more = int(headers.get("content-length", "0")), bytearray(), True
    if length > most and "expect" in headers:
        raise too_large
    # Read to its end all the same: clients that are still sending would not see the refusal.
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        length = max(length, len(body) + len(message.get("body", b"")))
        if length <= most:
            body += message.get("body", b"")
        more = message.get("more_body", False)
    if length > most:
        raise too_large
    return bytes(body)


async def while_there(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Do the work, and drop it when the client leaves."""
    answer, left = asyncio.ensure_future(work), asyncio.ensure_future(receive())
    try:
        await asyncio.wait({answer, left}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        answer.cancel()
        left.cancel()
        await asyncio.gather(answer, left, return_exceptions=True)
    if answer.cancelled():
        raise Gone
    answer.result()


class Response:
    """What is sent to one client."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def whole(self, status: int, content: Any) -> None:
        body = json.dumps(content, ensure_ascii=False).encode()
        await self._start(status, [(b"content-type", JSON), (b"content-length", str(len(body)).encode())])
        await self._send({"type": "http.response.body", "body": body})

    async def piece(self, text: str, kind: bytes) -> None:
        if not self.begun:
            await self._start(200, [(b"content-type", kind), (b"cache-control", b"no-cache")])
        await self._send({"type": "http.response.body", "body": text.encode(), "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body"})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
