"""Messages between the processes of a sandbox: a JSON header and byte strings. Nothing in them can be executed."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

_SIZE = struct.Struct("!I")
_MOST_HEADER = 1 << 24


def send(
    link: socket.socket, header: Mapping[str, Any], blobs: Sequence[bytes] = (), descriptors: Sequence[int] = ()
) -> None:
    """Descriptors travel with the first byte."""
    text = json.dumps({**header, "sizes": [len(blob) for blob in blobs]}).encode()
    message = b"".join([_SIZE.pack(len(text)), text, *blobs])
    sent = socket.send_fds(link, [message], descriptors) if descriptors else 0
    link.sendall(memoryview(message)[sent:])


def receive(link: socket.socket, descriptors: int = 0) -> tuple[dict[str, Any], list[bytes], list[int]]:
    """EOFError: the other side is gone."""
    came: list[int] = []
    if descriptors:
        start, came, _, _ = socket.recv_fds(link, _SIZE.size, descriptors)
        size = start + (_exactly(link, _SIZE.size - len(start)) if start else b"")
    else:
        size = _exactly(link, _SIZE.size)
    if len(size) < _SIZE.size:
        raise EOFError
    (length,) = _SIZE.unpack(size)
    if length > _MOST_HEADER:
        raise EOFError("not a message of a sandbox")
    header = json.loads(_exactly(link, length))
    return header, [_exactly(link, size) for size in header["sizes"]], came


def _exactly(link: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        chunk = link.recv(min(count - len(received), 1 << 20))
        if not chunk:
            raise EOFError
        received += chunk
    return bytes(received)
