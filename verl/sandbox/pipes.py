"""stdin, stdout and stderr of a program that may never read, never stop writing, or leave them open."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import time
from collections.abc import Sequence

_READ_BYTES = 1 << 16


class Output:
    """What a program wrote, up to a size; the rest is counted as cut."""

    def __init__(self, most: int) -> None:
        self.stdout, self.stderr = bytearray(), bytearray()
        self._left = most
        self.cut = False

    def add(self, stream: bytearray, chunk: bytes) -> None:
        self.cut |= len(chunk) > self._left
        stream += chunk[: self._left]
        self._left -= min(len(chunk), self._left)


class Pipes:
    """stdin, stdout and stderr of a program."""

    def __init__(self, stdin: bytes, output: Output) -> None:
        self.output = output
        self._stdin = memoryview(stdin)
        (their_in, self._in), (self._out, their_out), (self._err, their_err) = os.pipe(), os.pipe(), os.pipe()
        self.theirs = [their_in, their_out, their_err]
        for descriptor in (self._in, self._out, self._err):
            os.set_blocking(descriptor, False)
        self._open = {self._out, self._err}
        self._poll = select.poll()
        for descriptor in self._open:
            self._poll.register(descriptor, select.POLLIN)
        self._write = True
        if not stdin:
            self._end_input()
        else:
            self._poll.register(self._in, select.POLLOUT)

    def __enter__(self) -> Pipes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_theirs()
        self._end_input()
        for descriptor in (self._out, self._err):
            os.close(descriptor)

    def close_theirs(self) -> None:
        for descriptor in self.theirs:
            os.close(descriptor)
        self.theirs = []

    def carry(self, links: Sequence[socket.socket], seconds: float) -> list[socket.socket]:
        """Move what can be moved within `seconds`; those of `links` that have something to say."""
        by_number = {link.fileno(): link for link in links}
        for number in by_number:
            self._poll.register(number, select.POLLIN)
        ready = []
        for descriptor, _ in self._poll.poll(seconds * 1000):
            if descriptor in by_number:
                ready.append(by_number[descriptor])
            elif descriptor == self._in:
                self._feed()
            else:
                self._take(descriptor)
        for number in by_number:
            self._poll.unregister(number)
        return ready

    def drain(self, until: float) -> None:
        """What comes until the pipes are closed or the time is over, and what is in them then.

        No more than a pipe holds: something that still runs may write faster than this reads.
        """
        while self._open:
            patience = max(until - time.monotonic(), 0.0)
            ready = [descriptor for descriptor, _ in self._poll.poll(patience * 1000) if descriptor in self._open]
            if not ready:
                return
            if time.monotonic() >= until:
                break
            for descriptor in ready:
                self._take(descriptor)
        for descriptor in tuple(self._open):
            left = fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ)
            while left > 0 and (taken := self._take(descriptor)):
                left -= taken

    def _take(self, descriptor: int) -> int:
        """How many bytes there were; 0: none now, or none any more."""
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

    def _feed(self) -> None:
        try:
            self._stdin = self._stdin[os.write(self._in, self._stdin[:_READ_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it does not want the rest
            self._stdin = self._stdin[:0]
        if not self._stdin:
            self._poll.unregister(self._in)
            self._end_input()

    def _end_input(self) -> None:
        if self._write:
            self._write = False
            with contextlib.suppress(KeyError):
                self._poll.unregister(self._in)
            os.close(self._in)
