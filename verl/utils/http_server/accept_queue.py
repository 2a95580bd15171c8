"""AcceptQueue: accepted connections until their first request, so that a flood of connections delays no other client.

A connection costs little until its client sends data. Connections with data are passed to the server in the order of
their data, a few in each iteration of the event loop. GET /health comes first: it is answered within a fraction of a
second during a flood.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["MAX_READY_CONNECTIONS", "UNAVAILABLE", "AcceptQueue", "OpenConnections"]

_HEALTH = b"GET /health"
# Per iteration of the event loop: connections that are accepted (about 40 µs each) and passed on (400 µs each).
_ACCEPTED_AT_ONCE, _PASSED_AT_ONCE = 256, 16
_PAUSE_SECONDS = 0.1
_REJECTED_BYTES = 1 << 16

MAX_READY_CONNECTIONS = 2048
"""Connections with data that wait to be passed on, in addition to those that the server allows."""

_MAX_HEALTH_CONNECTIONS = 64
UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"


class OpenConnections(NamedTuple):
    """Numbers of connections of a server."""

    total: int
    replaceable: int
    """Without a complete request: the server closes one of them for a new connection."""
    unread: int
    """Passed on, but their data was not read yet. The server does not know whether they have a complete request."""


class AcceptQueue:
    """Accepts the connections of a listening socket and passes them to the server when they have data.

    Above `max_connections` in total, the oldest connection without data is closed for a new one. A connection with data
    is passed on when the server has room or has read all others; if `max_ready` such connections wait, it gets 503. A
    connection without data is closed after `seconds`.
    """

    def __init__(
        self,
        listener: socket.socket,
        create_protocol: Callable[[], asyncio.BaseProtocol],
        open_connections: Callable[[], OpenConnections],
        max_connections: int,
        max_ready: int,
        seconds: float,
    ) -> None:
        self._listener, self._create_protocol = listener, create_protocol
        self._open_connections, self._max_connections, self._max_ready = open_connections, max_connections, max_ready
        self._seconds = seconds
        self._silent: dict[socket.socket, float] = {}
        """Connections without data and when each was accepted, oldest first."""
        self._health: deque[socket.socket] = deque()
        self._ready: deque[socket.socket] = deque()
        self._pending: set[asyncio.Task[None]] = set()
        self._is_passing = False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(seconds, self._close_expired)
        self._resume()

    def close(self) -> None:
        """Stop accepting, and close the connections in the queue."""
        self._loop.remove_reader(self._listener)
        self._timer.cancel()
        for connection in list(self._silent):
            self._close_silent(connection)
        for queue in (self._health, self._ready):
            while queue:
                queue.popleft().close()

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # too many open files
                if not self._evict():
                    self._loop.remove_reader(self._listener)
                    self._loop.call_later(_PAUSE_SECONDS, self._resume)
                return
            connection.setblocking(False)
            if self._count() >= self._max_connections:
                self._evict()
            self._silent[connection] = time.monotonic()
            self._check_data(connection)
            if connection in self._silent:
                self._loop.add_reader(connection, self._check_data, connection)

    def _count(self) -> int:
        return len(self._silent) + len(self._health) + len(self._ready) + self._open_connections().total

    def _evict(self) -> bool:
        """Close the oldest connection without data; False if all have data. The event loop may not have reported data
        yet, so each is checked."""
        while self._silent:
            oldest = next(iter(self._silent))
            if not self._check_data(oldest):
                self._close_silent(oldest)
            if oldest.fileno() < 0:
                return True
        return False

    def _check_data(self, connection: socket.socket) -> bool:
        """Queue the connection and return True if its client has sent data; close it if its client has closed it."""
        try:
            start = connection.recv(len(_HEALTH), socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            start = b""
        if not start:
            self._close_silent(connection)
            return True
        del self._silent[connection]
        self._loop.remove_reader(connection)
        if start == _HEALTH and len(self._health) < _MAX_HEALTH_CONNECTIONS:
            self._health.append(connection)
        elif len(self._ready) < self._max_ready:
            self._ready.append(connection)
        else:
            _reject(connection)
        if not self._is_passing:
            self._is_passing = True
            self._loop.call_soon(self._pass_on)
        return True

    def _pass_on(self) -> None:
        for _ in range(self._room()):
            queue = self._health or self._ready
            if not queue:
                break
            task = self._loop.create_task(self._connect(queue.popleft()))
            self._pending.add(task)
            task.add_done_callback(self._pending.discard)
        self._is_passing = bool(self._health or self._ready)
        if self._is_passing:
            self._loop.call_soon(self._pass_on)

    def _room(self) -> int:
        """Connections to pass on now: as many as the server can take without closing one whose data it has not read.
        If it can take none, it gets one and responds with 503."""
        connections, pending = self._open_connections(), len(self._pending)
        room = self._max_connections - connections.total + connections.replaceable - pending
        if room <= 0:
            return 0 if connections.unread or pending else 1
        return min(room, _PASSED_AT_ONCE)

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._create_protocol, connection)
        except OSError:  # the client has disconnected
            connection.close()

    def _close_silent(self, connection: socket.socket) -> None:
        del self._silent[connection]
        self._loop.remove_reader(connection)
        with contextlib.suppress(OSError):
            connection.close()

    def _close_expired(self) -> None:
        now = time.monotonic()
        for connection, since in list(self._silent.items()):
            if now - since < self._seconds:
                break
            self._close_silent(connection)
        oldest = next(iter(self._silent.values()), now)
        self._timer = self._loop.call_later(max(0.05, oldest + self._seconds - now), self._close_expired)


def _reject(connection: socket.socket) -> None:
    """Respond with 503 and close. Data that was not read would make the kernel reset the connection."""
    with contextlib.suppress(OSError):
        connection.send(UNAVAILABLE)
        connection.recv(_REJECTED_BYTES)
    connection.close()
