"""Connections of all HTTP servers: uvicorn with limits on their number and on the time each may wait."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import logging
import resource
import select
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from verl.utils import process_tree
from verl.utils.http_server import DEFAULT_CONNECTIONS
from verl.utils.http_server.accept_queue import MAX_HEALTH_CONNECTIONS, MAX_QUEUED_CONNECTIONS, AcceptQueue
from verl.utils.resources import trim_heap

__all__ = [
    "ConnectionLimits",
    "LocalServer",
    "bind_socket",
    "create_server",
    "run_event_loop",
    "serve_in_thread",
    "warn_if_public",
]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# File descriptors reserved for other files than connections.
_OWN_FILES = 256
_POLL_SECONDS = 0.01
# Events of connections that are handled in one iteration of the loop. A request needs several iterations.
_EVENTS_AT_ONCE = 256
# After this time a thread that computes lets the event loop run (Python's default: 5 ms).
_SWITCH_SECONDS = 0.001
_BACKLOG = 2048
# Freed memory is returned to the system every 2 s (20 ticks), if the process has grown by this many bytes since the
# last time, or has become idle.
_TICKS_PER_TRIM, _GROWTH_BYTES = 20, 4 << 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on the connections of a server: their number, their times and the size of their headers."""

    connections: int = DEFAULT_CONNECTIONS
    """Open connections. Above it, the connection that has waited longest for a request is closed for a new one; if
    all have requests, the new one gets 503."""
    protected_seconds: float = 1.0
    """Time in which an incomplete request is not closed for a new connection. The new connection waits."""
    idle_seconds: int = 60
    """Time a connection may stay open between two requests."""
    request_seconds: float = 60.0
    """Time from the first byte of a request to its last, and from connecting to the first byte."""
    stalled_seconds: float = 60.0
    """Time a response may wait for its reader."""
    grace_seconds: int = 10
    """Time for in-flight requests when the server is stopped."""
    header_bytes: int = 16384
    """Size of the request line and all headers."""


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to the address; `serve` makes it listen. ValueError: the address cannot be used.

    Call it before anything expensive is loaded, so that a wrong address is reported at once.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
    except (OSError, OverflowError, UnicodeError) as error:
        raise ValueError(
            f"--host {host} --port {port}: cannot bind to this address: {error}. Choose another."
        ) from error
    return bound


def warn_if_public(bound: socket.socket, remedy: str) -> None:
    """Warn when the address is not a loopback address."""
    address = ipaddress.ip_address(bound.getsockname()[0].partition("%")[0])
    if not address.is_loopback:
        logger.warning("anyone who can connect to %s can use this server. %s", address, remedy)


def create_server(
    app: Any,
    name: str,
    limits: ConnectionLimits,
    path: str = "",
    signals: bool = True,
    example: Callable[[str], str] | None = None,
) -> uvicorn.Server:
    """Return a server for an ASGI application; `name` and `path` are logged with its address, and then `example(URL)`.

    It stops at SIGTERM or SIGINT or, without `signals` (inside another program), when `should_exit` is set.
    """
    connections, max_queued = _allowed_connections(limits.connections)
    limits = replace(limits, connections=connections)
    config = uvicorn.Config(
        _HeaderLimit(app, limits.header_bytes),
        loop="asyncio",
        http=type(
            "Connection",
            (_Connection,),
            {"limits": limits, "open": set(), "unread": set(), "waiting": {}, "receiving": {}},
        ),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=limits.header_bytes,
        backlog=_BACKLOG,
        timeout_keep_alive=limits.idle_seconds,
        timeout_graceful_shutdown=limits.grace_seconds,
    )
    return _Server(config, name, limits, max_queued, path, signals, example)


def run_event_loop(work: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run` for a server: neither very many connections nor a computing thread delay a client for long."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    asyncio.set_event_loop_policy(_FairLoopPolicy())
    try:
        asyncio.run(work)
    finally:
        asyncio.set_event_loop_policy(None)
        sys.setswitchinterval(interval)


class _FairLoopPolicy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.SelectorEventLoop(_FairSelector()) if hasattr(select, "epoll") else super().new_event_loop()


class _FairSelector(selectors.DefaultSelector):
    """Returns a limited number of events at a time; epoll then continues with those that it has not returned yet."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        epoll: Any = self._selector  # type: ignore[attr-defined]
        ready = []
        for descriptor, event in epoll.poll(-1 if timeout is None else max(0, timeout), _EVENTS_AT_ONCE):
            events = selectors.EVENT_WRITE if event & ~select.EPOLLIN else 0
            events |= selectors.EVENT_READ if event & ~select.EPOLLOUT else 0
            key = self.get_map().get(descriptor)
            if key is not None:
                ready.append((key, events & key.events))
        return ready


def _allowed_connections(count: int) -> tuple[int, int]:
    """Raise the soft limit on open files if necessary. Return how many connections it allows, and how many more may
    wait to be passed on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reserved = _OWN_FILES + MAX_QUEUED_CONNECTIONS
    if soft != resource.RLIM_INFINITY and soft < count + reserved:
        soft = count + reserved if hard == resource.RLIM_INFINITY else min(count + reserved, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return count, MAX_QUEUED_CONNECTIONS
    reserved = min(reserved, soft // 2)
    return max(1, min(count, soft - reserved)), max(1, reserved - _OWN_FILES, reserved // 4)


class _HeaderLimit:
    """Rejects requests with large headers. h11 only limits headers that arrive in several pieces."""

    def __init__(self, app: Any, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) + len(": \r\n") for name, value in scope["headers"])
        if size <= self._max_bytes:
            return await self._app(scope, receive, send)
        headers = [(b"content-length", b"0"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 431, "headers": headers})
        await send({"type": "http.response.body"})


class _Server(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        name: str,
        limits: ConnectionLimits,
        max_queued: int,
        path: str,
        signals: bool,
        example: Callable[[str], str] | None,
    ) -> None:
        super().__init__(config)
        self._name, self._limits, self._path, self._example = name, limits, path, example
        self._max_queued = max_queued
        self._signals = _SIGNALS if signals else ()
        self._accept_queues: list[AcceptQueue] = []
        self._trimmed_to = 0
        self._activity_at_trim = (0, 0)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        loop = asyncio.get_running_loop()
        for bound in sockets or ():
            loop.remove_reader(bound)  # of asyncio, which would accept and prepare all connections that wait at once
            self._accept_queues.append(self._create_accept_queue(bound))
        host, port = (sockets or [])[0].getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{port}{self._path}"
        logger.info("serving %s at %s", self._name, url)
        if self._example is not None:
            logger.info("example: %s", self._example(url))

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times per second. Returns freed heap memory to the system, which malloc would keep."""
        if counter % _TICKS_PER_TRIM == 0 and self._should_trim():
            self._activity_at_trim = self._activity()
            await asyncio.to_thread(trim_heap)
            self._trimmed_to = process_tree.resident_bytes()
        return await super().on_tick(counter)

    def _should_trim(self) -> bool:
        if process_tree.resident_bytes() > self._trimmed_to + _GROWTH_BYTES:
            return True
        return not self.server_state.tasks and self._activity() != self._activity_at_trim

    def _activity(self) -> tuple[int, int]:
        """Return (requests so far, open connections): connections that send no request use memory, too."""
        return self.server_state.total_requests, len(self.server_state.connections)

    def _create_accept_queue(self, bound: socket.socket) -> AcceptQueue:
        protocol: Any = self.config.http_protocol_class

        def create_protocol() -> asyncio.Protocol:
            return protocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

        return AcceptQueue(bound, create_protocol, protocol.count_room, self._max_queued, self._limits.request_seconds)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for queue in self._accept_queues:
            queue.close()
        if self._signals:
            grace = self._limits.grace_seconds
            logger.info("stopping: in-flight requests have %d s to finish (send the signal again to stop now)", grace)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The first signal starts a graceful shutdown and restores the default action, so the second one kills."""

        def stop(_number: int, _frame: FrameType | None) -> None:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            self.should_exit = True

        previous = {number: signal.signal(number, stop) for number in self._signals}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


class _Connection(H11Protocol):
    limits: ConnectionLimits
    open: set[_Connection]
    """The server's connections, except those that are being closed."""
    unread: set[_Connection]
    """Connections of which nothing was read yet. They have data: no other connection replaces them."""
    waiting: dict[_Connection, float]
    """Connections without a request and when each began to wait, oldest first."""
    receiving: dict[_Connection, float]
    """Connections whose request body is not complete and when it began, oldest first."""
    _request_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    @classmethod
    def count_room(cls, wanted: int) -> int | None:
        """Return how many connections, up to `wanted`, the server can take without closing a protected one; None if
        there will be no room before a request is finished."""
        room = cls.limits.connections - len(cls.open)
        if room + len(cls.unread) + len(cls.waiting) + len(cls.receiving) <= 0:
            return None
        latest = time.monotonic() - cls.limits.protected_seconds
        for queue in (cls.waiting, cls.receiving):
            unprotected = itertools.takewhile(lambda since: since <= latest, queue.values())
            room += sum(1 for _ in itertools.islice(unprotected, max(0, wanted - room)))
        return max(0, min(room, wanted))

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.open.add(self)
        self.unread.add(self)
        self._request_timer = self._abort_after(self.limits.request_seconds)
        excess = len(self.open) - self.limits.connections
        if excess > 0:
            # GET /health does not wait for room. A few of them may exceed the limit.
            self._close_longest_waiting(self.limits.protected_seconds if excess <= MAX_HEALTH_CONNECTIONS else 0)

    def _close_longest_waiting(self, protected_seconds: float) -> None:
        """Close the connection that has waited longest for a request, unless it is protected: clients that open
        connections without sending requests must not keep others out."""
        latest = time.monotonic() - protected_seconds
        for queue in (self.waiting, self.receiving):
            longest = next(iter(queue), None)
            if longest is not None and queue[longest] <= latest:
                longest._leave_queues()
                self.open.discard(longest)
                longest.transport.abort()
                return

    def data_received(self, data: bytes) -> None:
        self.unread.discard(self)
        if not self.flow.write_paused:
            self._stop_write_timer()
        super().data_received(data)
        self._enter_queue()
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_request_timer()
        elif self._request_timer is None:
            self._request_timer = self._abort_after(self.limits.request_seconds)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._enter_queue()
        if self.conn.their_state is h11.SEND_BODY and self._request_timer is None:  # of a pipelined request
            self._request_timer = self._abort_after(self.limits.request_seconds)
        self._start_drain_timer()

    def _enter_queue(self) -> None:
        """Put the connection into the queue of its state, if any; keep its position if it is already there."""
        queues = {h11.IDLE: self.waiting, h11.SEND_BODY: self.receiving}
        queue = None if self.transport.is_closing() else queues.get(self.conn.their_state)
        if queue is None or self not in queue:
            self._leave_queues()
        if queue is not None:
            queue.setdefault(self, time.monotonic())

    def _leave_queues(self) -> None:
        self.unread.discard(self)
        self.waiting.pop(self, None)
        self.receiving.pop(self, None)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_write_timer()
        self._write_timer = self._abort_after(self.limits.stalled_seconds)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()
        if self.cycle is None or self.cycle.response_complete:
            self._start_drain_timer()

    def _start_drain_timer(self) -> None:
        """Limit the time until the client has read the end of a response that asyncio has buffered: no write follows
        that would start the timer of `pause_writing`."""
        if self._write_timer is None and self.transport.get_write_buffer_size():
            self._write_timer = self.loop.call_later(self.limits.stalled_seconds, self._abort_if_unread)

    def _abort_if_unread(self) -> None:
        self._write_timer = None
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_request_timer()
        self._stop_write_timer()
        self._leave_queues()
        self.open.discard(self)
        super().connection_lost(exc)

    def _abort_after(self, seconds: float) -> asyncio.TimerHandle:
        return self.loop.call_later(seconds, self.transport.abort)

    def _stop_request_timer(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


# ---------------------------------------------------------------- servers inside other programs


@contextlib.contextmanager
def serve_in_thread(
    app: Any, name: str, host: str = "127.0.0.1", limits: ConnectionLimits | None = None
) -> Iterator[int]:
    """Context in which a thread serves `app` on a free port; yields the port."""
    with bind_socket(host, 0) as bound:
        server = create_server(app, name, limits or ConnectionLimits(), "/v1", signals=False)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([bound])), name="server", daemon=True)
        thread.start()
        while thread.is_alive() and not server.started:
            time.sleep(_POLL_SECONDS)
        if not server.started:
            raise RuntimeError(f"the server of {name} could not start; the error of its thread is in the log")
        try:
            yield int(bound.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join()


class LocalServer:
    """`async with LocalServer(app, name, limits) as address`: served by the running event loop on a loopback port."""

    def __init__(self, app: Any, name: str, limits: ConnectionLimits) -> None:
        self._server = create_server(app, name, limits, signals=False)

    async def __aenter__(self) -> str:
        self._socket = bind_socket("127.0.0.1", 0)
        self._socket.listen(2048)  # from now on clients are queued instead of refused
        self._task = asyncio.create_task(self._server.serve([self._socket]))
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = True
        await self._task
        self._socket.close()
