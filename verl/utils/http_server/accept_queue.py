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

__all__ = ["MAX_READY_CONNECTIONS", "AcceptQueue"]

_HEALTH = b"GET /health"
# Per iteration of the event loop: connections that are accepted (about 40 µs each) and passed on (400 µs each).
_ACCEPTED_AT_ONCE, _PASSED_AT_ONCE = 256, 16
_PAUSE_SECONDS = 1.0

MAX_READY_CONNECTIONS = 2048
"""Connections with data that wait to be passed on, in addition to those that the server allows."""


class AcceptQueue:
    """Accepts the connections of a listening socket and passes them to the server when they have data.

    `open_connections` returns the number of connections of the server. Above `max_connections` in total, the oldest
    connection without data is closed; if there is none, the new one is passed on and the server decides. A connection
    without data is closed after `seconds`.
    """

    def __init__(
        self,
        listener: socket.socket,
        create_protocol: Callable[[], asyncio.BaseProtocol],
        open_connections: Callable[[], int],
        max_connections: int,
        seconds: float,
    ) -> None:
        self._listener, self._create_protocol = listener, create_protocol
        self._open_connections, self._max_connections, self._seconds = open_connections, max_connections, seconds
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
                if not self._evict(0):
                    self._loop.remove_reader(self._listener)
                    self._loop.call_later(_PAUSE_SECONDS, self._resume)
                return
            connection.setblocking(False)
            self._evict(self._max_connections)
            self._silent[connection] = time.monotonic()
            self._check_data(connection)
            if connection in self._silent:
                self._loop.add_reader(connection, self._check_data, connection)

    def _evict(self, limit: int) -> bool:
        """Close one connection if there are `limit` or more. Returns False if none could be closed."""
        if len(self._silent) + len(self._ready) + self._open_connections() < limit:
            return True
        if self._silent:
            self._close_silent(next(iter(self._silent)))
        elif len(self._ready) >= MAX_READY_CONNECTIONS or not limit:
            if not self._ready:
                return False
            self._ready.popleft().close()
        return True

    def _check_data(self, connection: socket.socket) -> None:
        """Queue the connection if its client has sent data."""
        try:
            start = connection.recv(len(_HEALTH), socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            start = b""
        if not start:
            self._close_silent(connection)
            return
        del self._silent[connection]
        self._loop.remove_reader(connection)
        (self._health if start == _HEALTH else self._ready).append(connection)
        if not self._is_passing:
            self._is_passing = True
            self._loop.call_soon(self._pass_on)

    def _pass_on(self) -> None:
        for _ in range(_PASSED_AT_ONCE):
            queue = self._health or self._ready
            if not queue:
                break
            task = self._loop.create_task(self._connect(queue.popleft()))
            self._pending.add(task)
            task.add_done_callback(self._pending.discard)
        self._is_passing = bool(self._health or self._ready)
        if self._is_passing:
            self._loop.call_soon(self._pass_on)

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
