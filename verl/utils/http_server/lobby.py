"""Lobby: accepted connections until their first request is handled, which is what a flood of connections must pass.

A connection costs little until its client sends something. Those that have sent something are admitted in the order of
their requests, a few in each iteration of the event loop, and GET /health before all others: it is answered within a
fraction of a second whatever arrives with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable

__all__ = ["MOST_READY", "Lobby"]

_HEALTH = b"GET /health"
# In one iteration of the event loop: connections that are accepted (about 40 µs each) and admitted (400 µs).
_ACCEPTED_AT_ONCE, _ADMITTED_AT_ONCE = 256, 16
_PAUSE_SECONDS = 1.0

MOST_READY = 2048
"""Connections that have sent something and wait until they are admitted, besides those that the server allows."""


class Lobby:
    """Accepts the connections of a listening socket and admits them to the server.

    `open_connections` returns the number of admitted ones. Above `most` connections in total, the one that has been
    silent for longest is closed; without a silent one, a new one is admitted and the server decides. One that sends
    nothing for `seconds` is closed.
    """

    def __init__(
        self,
        listener: socket.socket,
        create_protocol: Callable[[], asyncio.BaseProtocol],
        open_connections: Callable[[], int],
        most: int,
        seconds: float,
    ) -> None:
        self._listener, self._create_protocol = listener, create_protocol
        self._open_connections, self._most, self._seconds = open_connections, most, seconds
        self._silent: dict[socket.socket, float] = {}
        """When each was accepted, oldest first."""
        self._health: deque[socket.socket] = deque()
        self._ready: deque[socket.socket] = deque()
        self._admissions: set[asyncio.Task[None]] = set()
        self._is_admitting = False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(seconds, self._close_expired)
        self._resume()

    def close(self) -> None:
        """Accept nothing any more, and close the connections that wait here."""
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
                if not self._make_room(0):
                    self._loop.remove_reader(self._listener)
                    self._loop.call_later(_PAUSE_SECONDS, self._resume)
                return
            connection.setblocking(False)
            self._make_room(self._most)
            self._silent[connection] = time.monotonic()
            self._look(connection)
            if connection in self._silent:
                self._loop.add_reader(connection, self._look, connection)

    def _make_room(self, most: int) -> bool:
        """Close one connection if there are `most`; whether there was one to close."""
        if len(self._silent) + len(self._ready) + self._open_connections() < most:
            return True
        if self._silent:
            self._close_silent(next(iter(self._silent)))
        elif len(self._ready) >= MOST_READY or not most:
            if not self._ready:
                return False
            self._ready.popleft().close()
        return True

    def _look(self, connection: socket.socket) -> None:
        """Queue the connection if its client has sent something."""
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
        if not self._is_admitting:
            self._is_admitting = True
            self._loop.call_soon(self._admit)

    def _admit(self) -> None:
        for _ in range(_ADMITTED_AT_ONCE):
            queue = self._health or self._ready
            if not queue:
                break
            admission = self._loop.create_task(self._connect(queue.popleft()))
            self._admissions.add(admission)
            admission.add_done_callback(self._admissions.discard)
        self._is_admitting = bool(self._health or self._ready)
        if self._is_admitting:
            self._loop.call_soon(self._admit)

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._create_protocol, connection)
        except OSError:  # the client has left
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
