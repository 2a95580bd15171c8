"""uvicorn with the limits it lacks: how many connections there are, and how long each may keep the server waiting."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import resource
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["Limits", "asgi_server", "bound", "warn_if_open"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_OTHER_FILES = 256
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What one client may take from the others."""

    connections: int = 1024
    idle_seconds: int = 60
    """A connection may be without a request for so long."""
    request_seconds: float = 60.0
    """From the first byte of a request to its last; also from connecting to the first byte."""
    stalled_seconds: float = 60.0
    """An answer may wait so long for its reader."""
    grace_seconds: int = 10
    """For requests under way when the server is stopped."""


def bound(host: str, port: int) -> socket.socket:
    """The address is taken before anything is loaded; it listens when there is somebody to answer."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(family, kind, protocol)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
    except OSError as error:
        raise ValueError(f"--host {host} --port {port}: cannot be served on: {error}. Choose another.") from error
    return taken


def warn_if_open(taken: socket.socket, remedy: str) -> None:
    """Say so where other machines may ask."""
    address = ipaddress.ip_address(taken.getsockname()[0].partition("%")[0])
    if not address.is_loopback:
        logger.warning("anybody who reaches %s may use this server. %s", address, remedy)


def asgi_server(app: Any, what: str, limits: Limits, path: str = "", signals: bool = True) -> uvicorn.Server:
    """Serves an ASGI app; `what` it serves, below which path, is told in the log.

    It ends at a signal, or (without `signals`, inside a program that has its own) when `should_exit` is set.
    """
    _allow_files(limits.connections + _OTHER_FILES)
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http=type("Connection", (_Connection,), {"limits": limits}),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=limits.idle_seconds,
        timeout_graceful_shutdown=limits.grace_seconds,
    )
    return _Server(config, what, limits, path, signals)


def _allow_files(count: int) -> None:
    """Every connection is an open file, of which most systems allow 1,024 until asked for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, what: str, limits: Limits, path: str, signals: bool) -> None:
        super().__init__(config)
        self._what, self._limits, self._path = what, limits, path
        self._signals = _SIGNALS if signals else ()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = (sockets or [])[0].getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        logger.info("serving %s at http://%s:%d%s", self._what, shown, port, self._path)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._signals:
            logger.info("stopping: requests under way have %d s (again to stop at once)", self._limits.grace_seconds)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The first signal stops in order and leaves the next one to the system, which asks nobody."""

        def stop(_number: int, _frame: FrameType | None) -> None:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            self.should_exit = True

        before = {number: signal.signal(number, stop) for number in self._signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Connection(H11Protocol):
    limits: Limits
    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            transport.write(_TOO_MANY)
            transport.close()
        else:
            self._wait_at_most(self.limits.request_seconds)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._wait_no_more()
        elif self._patience is None:
            self._wait_at_most(self.limits.request_seconds)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_at_most(self.limits.stalled_seconds)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._wait_no_more()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def _wait_at_most(self, seconds: float) -> None:
        self._wait_no_more()
        self._patience = self.loop.call_later(seconds, self.transport.abort)

    def _wait_no_more(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
