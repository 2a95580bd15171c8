"""Messages between a checker and a candidate process: JSON arrays, each preceded by its length.

While a side waits for a reply, it serves requests of the other side (a candidate calls a function that the test passed
to it), so requests may nest and no thread is needed. Standard library only: this file also runs inside the sandbox.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from typing import Any, NoReturn

_LENGTH = struct.Struct("!I")
MAX_MESSAGE = 128 << 20
_READ_SIZE = 1 << 16
MAX_NESTED = 60


class ChannelClosed(Exception):
    """The other process has ended, or has closed its side."""


class ProtocolError(Exception):
    """The other process sent something that is not a message of this protocol."""


def _refuse(*_: object) -> NoReturn:
    raise ProtocolError("JSON objects, NaN and Infinity are not part of the protocol")


_decoder = json.JSONDecoder(object_pairs_hook=_refuse, parse_constant=_refuse)
_encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class Channel:
    """One end of a stream; `serve` answers the requests of the other side."""

    def __init__(self, descriptor: int, serve: Callable[[str, list[Any]], list[Any]]) -> None:
        self._descriptor = descriptor
        self._serve = serve
        self._next = 0
        self._nested = 0
        self._received = b""

    def request(self, operation: str, *parts: Any) -> list[Any]:
        """Send a request and return the parts of its reply."""
        self._next += 1
        number = self._next
        self.send(["request", number, operation, list(parts)])
        while True:
            message = self.receive()
            if message[0] == "request":
                self._handle(message)
            elif len(message) == 3 and message[0] == "reply" and message[1] == number and type(message[2]) is list:
                return message[2]
            else:
                raise ProtocolError("not the reply to the last request")

    def serve_forever(self) -> None:
        while True:
            message = self.receive()
            if message[0] != "request":
                raise ProtocolError("not a request")
            self._handle(message)

    def send(self, message: list[Any]) -> None:
        try:
            data = _encoder.encode(message).encode()
        except ValueError as error:
            raise ProtocolError(f"not a message: {error}") from None
        if len(data) > MAX_MESSAGE:
            raise ProtocolError("message too large")
        view = memoryview(_LENGTH.pack(len(data)) + data)
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except OSError as error:
                raise ChannelClosed(str(error)) from None

    def receive(self) -> list[Any]:
        (length,) = _LENGTH.unpack(self._read_exactly(_LENGTH.size))
        if length > MAX_MESSAGE:
            raise ProtocolError("message too large")
        try:
            message = _decoder.decode(self._read_exactly(length).decode())
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"not JSON: {type(error).__name__}") from None
        if type(message) is not list or not message or type(message[0]) is not str:
            raise ProtocolError("not a message")
        return message

    def _handle(self, message: list[Any]) -> None:
        if len(message) != 4 or type(message[1]) is not int or type(message[2]) is not str:
            raise ProtocolError("not a request")
        if type(message[3]) is not list or self._nested >= MAX_NESTED:
            raise ProtocolError("not a request, or nested too deeply")
        self._nested += 1
        try:
            self.send(["reply", message[1], self._serve(message[2], message[3])])
        finally:
            self._nested -= 1

    def _read_exactly(self, count: int) -> bytes:
        received = self._received
        if len(received) < count:
            parts, missing = [received], count - len(received)
            while missing > 0:
                try:
                    part = os.read(self._descriptor, max(_READ_SIZE, min(missing, 1 << 20)))
                except OSError as error:
                    raise ChannelClosed(str(error)) from None
                if not part:
                    raise ChannelClosed("end of stream")
                parts.append(part)
                missing -= len(part)
            received = b"".join(parts)
        self._received = received[count:]
        return received[:count]
