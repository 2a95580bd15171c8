"""AcceptQueue: holds connections until they send a request, so that a flood of connections delays no other client.

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

__all__ = ["MAX_HEALTH_CONNECTIONS", "MAX_QUEUED_CONNECTIONS", "AcceptQueue"]

_HEALTH = b"GET /health"
# Per iteration of the event loop: connections that are accepted (about 40 µs each) and passed on (400 µs each).
_ACCEPTED_AT_ONCE, _PASSED_AT_ONCE = 256, 16
# Pause in accepting connections when the process has too many open files.
_PAUSE_SECONDS = 0.1
# Interval at which a server without room is checked again.
_RETRY_SECONDS = 0.005
# Bytes read from a connection before it is rejected.
_REJECTED_BYTES = 1 << 16

MAX_QUEUED_CONNECTIONS = 4096
"""Connections of the queue, in addition to those of the server."""

MAX_HEALTH_CONNECTIONS = 64
"""Connections with GET /health that are passed on before all others, even if the server has no room."""

_UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"


class AcceptQueue:
    """Accepts the connections of a listening socket and passes them to the server when they have data.

    `count_room(wanted)` returns how many connections, up to `wanted`, the server can take now; None if they should not
    wait but get 503. Above `max_queued` connections, the oldest one without data is closed for a new one; if all have
    data, the new one gets 503. A connection without data is closed after `seconds`.
    """

    def __init__(
        self,
        listener: socket.socket,
        create_protocol: Callable[[], asyncio.BaseProtocol],
        count_room: Callable[[int], int | None],
        max_queued: int,
        seconds: float,
    ) -> None:
        self._listener, self._create_protocol, self._count_room = listener, create_protocol, count_room
        self._max_queued, self._seconds = max_queued, seconds
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
            if self._is_full():
                self._evict()
            self._silent[connection] = time.monotonic()
            self._check_data(connection)
            if connection in self._silent:
                self._loop.add_reader(connection, self._check_data, connection)

    def _is_full(self) -> bool:
        return len(self._silent) + len(self._ready) >= self._max_queued

    def _evict(self) -> bool:
        """Close the oldest connection without data; return False if all have data. Each connection is checked, because
        the event loop may not have reported its data yet."""
        while self._silent:
            oldest = next(iter(self._silent))
            if not self._check_data(oldest):
                self._close_silent(oldest)
            if oldest.fileno() < 0:
                return True
        return False

    def _check_data(self, connection: socket.socket) -> bool:
        """Return whether the client has sent data or disconnected; if so, queue, reject or close the connection."""
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
        if start == _HEALTH and len(self._health) < MAX_HEALTH_CONNECTIONS:
            self._health.append(connection)
        elif self._is_full():
            _reject(connection)
        else:
            self._ready.append(connection)
        if not self._is_passing:
            self._is_passing = True
            self._loop.call_soon(self._pass_on)
        return True

    def _pass_on(self) -> None:
        # GET /health uses at most half of an iteration, so that others are never starved.
        passed = [self._health.popleft() for _ in range(min(len(self._health), _PASSED_AT_ONCE // 2))]
        taken = len(self._pending) + len(passed)
        room = self._count_room(_PASSED_AT_ONCE + taken)
        if room is None:
            while self._ready:
                _reject(self._ready.popleft())
        else:
            count = min(len(self._ready), _PASSED_AT_ONCE - len(passed), room - taken)
            passed += [self._ready.popleft() for _ in range(count)]
        for connection in passed:
            task = self._loop.create_task(self._connect(connection))
            self._pending.add(task)
            task.add_done_callback(self._pending.discard)
        self._is_passing = bool(self._health or self._ready)
        if self._is_passing:
            self._loop.call_later(0 if passed else _RETRY_SECONDS, self._pass_on)

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
            if not self._check_data(connection):
                self._close_silent(connection)
        oldest = next(iter(self._silent.values()), now)
        self._timer = self._loop.call_later(max(0.05, oldest + self._seconds - now), self._close_expired)


def _reject(connection: socket.socket) -> None:
    """Respond with 503 and close. Data that was not read would make the kernel reset the connection."""
    with contextlib.suppress(OSError):
        connection.send(_UNAVAILABLE)
        connection.recv(_REJECTED_BYTES)
    connection.close()
