"""A small HTTP/1.1 server on asyncio: whole answers and server-sent events; who leaves cancels his request."""

from __future__ import annotations

import asyncio
import contextlib
import http
import json
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.utils.exceptions import Travels

__all__ = ["EventStream", "Handler", "HttpRequest", "HttpServer", "Reply"]

logger = logging.getLogger(__name__)

_HEAD_LIMIT = 32 * 2**10
_BODY_LIMIT = 64 * 2**20
_READ = 64 * 2**10
_IDLE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class HttpRequest:
    method: str
    path: str
    """Without the query."""
    headers: Mapping[str, str]
    """By lower-case name."""
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer; `content` is sent as JSON."""

    status: int
    content: Any
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EventStream:
    """Server-sent events; closing the generator ends whatever makes them."""

    events: AsyncGenerator[str, None]


Handler = Callable[[HttpRequest], Awaitable[Reply | EventStream]]


class HttpServer:
    """Serves `handler` on a bound socket. The handler's task is cancelled when its client is gone."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], _Connection] = {}

    async def start(self, bound: socket.socket) -> None:
        """Listen; returns at once."""
        self._server = await asyncio.start_server(self._on_connection, sock=bound, limit=_READ)

    async def close(self, grace: float) -> None:
        """Accept nobody any more, give requests under way `grace` seconds to finish, then cut them off."""
        if self._server is not None:
            self._server.close()
        for task, connection in self._connections.items():
            connection.last = True
            if not connection.busy:
                task.cancel()
        if self._connections:
            await asyncio.wait(self._connections, timeout=grace)
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connection = self._connections[task] = _Connection(reader, writer, self._handler)
        try:
            await connection.serve()
        except asyncio.CancelledError:
            # Ours, by `close`: the server's task ends here, so nobody is left to hear of it.
            logger.debug("a connection was cut off")
        finally:
            del self._connections[task]


class _Gone(Exception):
    """The client has closed the connection."""


class _Refused(Travels):
    """What came is not a request that can be answered: the status and why. The connection ends."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


class _Connection:
    """One client, request after request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler) -> None:
        self._reader, self._writer, self._handler = reader, writer, handler
        self._buffer = bytearray()
        self.busy = False
        self.last = False
        """The answer that is sent now, or next, is the last one."""

    async def serve(self) -> None:
        try:
            while not self.last:
                request = await asyncio.wait_for(self._read_request(), _IDLE_SECONDS)
                self.busy = True
                await self._answer_while_there(request)
                self.busy = False
        except _Refused as refused:
            self.last = True
            with contextlib.suppress(ConnectionError):
                await self._send(Reply(refused.status, {"error": {"message": refused.why, "type": "http_error"}}))
        except (_Gone, ConnectionError, asyncio.TimeoutError):
            pass  # A client may leave, or say nothing more, at any time.
        finally:
            self._writer.close()

    # ---------------------------------------------------------------- reading

    async def _read_request(self) -> HttpRequest:
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > _HEAD_LIMIT:
                raise _Refused(431, f"the head of the request is longer than {_HEAD_LIMIT} bytes.")
            await self._fill()
        lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        method, target, version = _request_line(lines[0])
        headers = dict(_header(line) for line in lines[1:])
        wants = headers.get("connection", "").lower()
        self.last = self.last or wants == "close" or (version == "HTTP/1.0" and wants != "keep-alive")
        length = _body_length(headers)
        if length and headers.get("expect", "").lower() == "100-continue":
            self._writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while len(self._buffer) < length:
            await self._fill()
        body = bytes(self._buffer[:length])
        del self._buffer[:length]
        return HttpRequest(method, target.partition("?")[0], headers, body)

    async def _fill(self) -> None:
        data = await self._reader.read(_READ)
        if not data:
            raise _Gone
        self._buffer += data

    async def _until_gone(self) -> None:
        """Raises when the client leaves; what it sends meanwhile is its next request."""
        while len(self._buffer) <= _BODY_LIMIT:
            await self._fill()
        raise _Gone

    # ---------------------------------------------------------------- answering

    async def _answer_while_there(self, request: HttpRequest) -> None:
        answer = asyncio.ensure_future(self._answer(request))
        watch = asyncio.ensure_future(self._until_gone())
        try:
            await asyncio.wait({answer, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answer, watch):
                if not task.done():
                    task.cancel()
            results = await asyncio.gather(answer, watch, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result

    async def _answer(self, request: HttpRequest) -> None:
        try:
            made = await self._handler(request)
        except Exception:
            logger.exception("%s %s failed", request.method, request.path)
            made = Reply(500, {"error": {"message": "the server failed; its log says how.", "type": "server_error"}})
        if isinstance(made, Reply):
            await self._send(made)
        else:
            await self._send_events(made)

    async def _send(self, reply: Reply) -> None:
        body = json.dumps(reply.content, ensure_ascii=False).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **reply.headers}
        self._writer.write(self._head(reply.status, headers) + body)
        await self._writer.drain()

    async def _send_events(self, stream: EventStream) -> None:
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "Transfer-Encoding": "chunked"}
        async with contextlib.aclosing(stream.events) as events:
            self._writer.write(self._head(200, headers))
            async for event in events:
                data = f"data: {event}\n\n".encode()
                self._writer.write(b"%x\r\n%s\r\n" % (len(data), data))
                await self._writer.drain()
        self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()

    def _head(self, status: int, headers: Mapping[str, str]) -> bytes:
        lines = [f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines.append(f"Connection: {'close' if self.last else 'keep-alive'}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _request_line(line: str) -> tuple[str, str, str]:
    parts = line.split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        raise _Refused(400, "the first line is not that of an HTTP/1.1 request.")
    return parts[0], parts[1], parts[2]


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not name or name != name.strip():
        raise _Refused(400, "a header of the request is not written as 'name: value'.")
    return name.lower(), value.strip()


def _body_length(headers: Mapping[str, str]) -> int:
    if "transfer-encoding" in headers:
        raise _Refused(411, "send the length of the body (Content-Length); chunks are not read.")
    given = headers.get("content-length", "0")
    if not (given.isascii() and given.isdigit()):
        raise _Refused(400, f"Content-Length {given!r} is not a number.")
    if int(given) > _BODY_LIMIT:
        raise _Refused(413, f"the body has {given} bytes; at most {_BODY_LIMIT} are read.")
    return int(given)
