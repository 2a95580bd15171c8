"""Messages between the processes of a sandbox, and the standard streams of a program."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

_HEADER_SIZE = struct.Struct("!I")
_MAX_HEADER_BYTES = 1 << 24
_READ_BYTES = 1 << 16

# -- messages: a JSON header and byte strings; nothing in them can be executed -------------------------------------


def send(
    link: socket.socket, header: Mapping[str, Any], blobs: Sequence[bytes] = (), descriptors: Sequence[int] = ()
) -> None:
    """Send a message. File descriptors are attached to its first byte."""
    text = json.dumps({**header, "sizes": [len(blob) for blob in blobs]}).encode()
    message = b"".join([_HEADER_SIZE.pack(len(text)), text, *blobs])
    sent = socket.send_fds(link, [message], descriptors) if descriptors else 0
    link.sendall(memoryview(message)[sent:])


def receive(link: socket.socket, max_descriptors: int = 0) -> tuple[dict[str, Any], list[bytes], list[int]]:
    """Return header, byte strings and descriptors of the next message; EOFError if the other side has closed."""
    descriptors: list[int] = []
    if max_descriptors:
        start, descriptors, _, _ = socket.recv_fds(link, _HEADER_SIZE.size, max_descriptors)
        if not start:
            raise EOFError
        prefix = start + _read_exactly(link, _HEADER_SIZE.size - len(start))
    else:
        prefix = _read_exactly(link, _HEADER_SIZE.size)
    (length,) = _HEADER_SIZE.unpack(prefix)
    if length > _MAX_HEADER_BYTES:
        raise EOFError("not a message of a sandbox")
    header = json.loads(_read_exactly(link, length))
    return header, [_read_exactly(link, size) for size in header["sizes"]], descriptors


def _read_exactly(link: socket.socket, count: int) -> bytes:
    """Read `count` bytes; EOFError if the other side closes before."""
    received = bytearray()
    while len(received) < count:
        chunk = link.recv(min(count - len(received), 1 << 20))
        if not chunk:
            raise EOFError
        received += chunk
    return bytes(received)


# -- stdin, stdout and stderr of a program that may never read, never stop writing, or leave them open ---------------


class ProgramOutput:
    """The output of a program, up to `max_bytes` in total."""

    def __init__(self, max_bytes: int) -> None:
        self.stdout, self.stderr = bytearray(), bytearray()
        self._remaining = max_bytes
        self.truncated = False
        """Whether output beyond `max_bytes` was dropped."""

    def add(self, stream: bytearray, chunk: bytes) -> None:
        self.truncated |= len(chunk) > self._remaining
        stream += chunk[: self._remaining]
        self._remaining -= min(len(chunk), self._remaining)


class Pipes:
    """Pipes to a program's stdin, stdout and stderr. This process has non-blocking ends."""

    def __init__(self, stdin: bytes, output: ProgramOutput) -> None:
        self.output = output
        self._stdin = memoryview(stdin)
        (program_in, self._in), (self._out, program_out), (self._err, program_err) = os.pipe(), os.pipe(), os.pipe()
        self.program_ends = [program_in, program_out, program_err]
        """Descriptors to send to the program, then to close here."""
        for descriptor in (self._in, self._out, self._err):
            os.set_blocking(descriptor, False)
        self._open = {self._out, self._err}
        """Outputs that the program has not closed."""
        self._poll = select.poll()
        for descriptor in self._open:
            self._poll.register(descriptor, select.POLLIN)
        self._stdin_open = True
        if not stdin:
            self._close_stdin()
        else:
            self._poll.register(self._in, select.POLLOUT)

    def __enter__(self) -> Pipes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_program_ends()
        self._close_stdin()
        for descriptor in (self._out, self._err):
            os.close(descriptor)

    def close_program_ends(self) -> None:
        for descriptor in self.program_ends:
            os.close(descriptor)
        self.program_ends = []

    def transfer(self, links: Sequence[socket.socket], seconds: float) -> list[socket.socket]:
        """Wait up to `seconds` until a pipe or one of `links` is ready; read from and write to the ready pipes.

        Returns the readable `links`.
        """
        by_descriptor = {link.fileno(): link for link in links}
        for descriptor in by_descriptor:
            self._poll.register(descriptor, select.POLLIN)
        ready = []
        for descriptor, _ in self._poll.poll(seconds * 1000):
            if descriptor in by_descriptor:
                ready.append(by_descriptor[descriptor])
            elif descriptor == self._in:
                self._write_stdin()
            else:
                self._read(descriptor)
        for descriptor in by_descriptor:
            self._poll.unregister(descriptor)
        return ready

    def drain(self, deadline: float) -> None:
        """Read until the program has closed its outputs, none has data, or the deadline has passed.

        After the deadline, at most the capacity of each pipe is read: a process that still runs may write faster than
        this process reads.
        """
        while self._open:
            timeout = max(deadline - time.monotonic(), 0.0)
            ready = [descriptor for descriptor, _ in self._poll.poll(timeout * 1000) if descriptor in self._open]
            if not ready:
                return
            if time.monotonic() >= deadline:
                break
            for descriptor in ready:
                self._read(descriptor)
        for descriptor in tuple(self._open):
            remaining = fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ)
            while remaining > 0 and (count := self._read(descriptor)):
                remaining -= count

    def _read(self, descriptor: int) -> int:
        """Read once; return the number of bytes: 0 if none are available, or the pipe is closed."""
        stream = self.output.stdout if descriptor == self._out else self.output.stderr
        try:
            chunk = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return 0
        if chunk:
            self.output.add(stream, chunk)
        else:
            self._poll.unregister(descriptor)
            self._open.discard(descriptor)
        return len(chunk)

    def _write_stdin(self) -> None:
        try:
            self._stdin = self._stdin[os.write(self._in, self._stdin[:_READ_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # the program has closed its stdin
            self._stdin = self._stdin[:0]
        if not self._stdin:
            self._poll.unregister(self._in)
            self._close_stdin()

    def _close_stdin(self) -> None:
        if self._stdin_open:
            self._stdin_open = False
            with contextlib.suppress(KeyError):
                self._poll.unregister(self._in)
            os.close(self._in)
