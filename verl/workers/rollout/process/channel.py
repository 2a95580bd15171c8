"""Channel: messages between two processes of one machine, over a socket that only they have. Each is a length and a
pickle: who is at the other end is this program itself."""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import threading
from typing import Any

__all__ = ["Channel"]

_LENGTH = struct.Struct("<Q")


class Channel:
    """One end. Any thread may send; one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()
        self._receiving = end.makefile("rb")

    def send(self, message: Any) -> None:
        """Returns when it has left. Raises OSError where the other end is gone."""
        data = pickle.dumps(message, protocol=5)
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> Any:
        """The next message. Raises EOFError, or OSError, where the other end is gone."""
        return pickle.loads(self._exactly(*_LENGTH.unpack(self._exactly(_LENGTH.size))))

    def close(self) -> None:
        """Nobody waits here any longer, nor at the other end."""
        with contextlib.suppress(OSError):  # the other end was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, size: int) -> bytes:
        data = self._receiving.read(size)
        if len(data) < size:
            raise EOFError
        return data
