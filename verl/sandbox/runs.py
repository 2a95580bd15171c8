"""Runs as the caller sees them: the future of a program, sessions, and the messages to a run's supervisor."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from verl.sandbox import streams
from verl.sandbox.types import Limits, Result

# The supervisor enforces time limits; if it is silent this much longer, it is considered dead.
GRACE_SECONDS = 15.0


class RunFuture(Future[Result]):
    """A submitted program; unlike the future of a thread pool, it can be cancelled while the program runs.

    `cancel()` returns True unless the result is set already. A queued program never starts. A running one is killed
    with all its processes: the call only closes the sending side of the connection to the supervisor and returns; the
    thread of `Sandbox.submit`, and so the program's slot, is released once the supervisor has killed the process tree.
    Cancelling the task that awaits `asyncio.wrap_future(sandbox.submit(...))` therefore stops the program.
    """

    # The state stays PENDING until the program has ended: `Future.cancel` refuses RUNNING futures.

    def __init__(self) -> None:
        super().__init__()
        self._link: socket.socket | None = None
        self._link_lock = threading.Lock()

    def cancel(self) -> bool:
        if not super().cancel():
            return False
        with self._link_lock:
            self._stop_program()
        return True

    def running(self) -> bool:
        return self._link is not None and not self.done()

    @contextlib.contextmanager
    def connected(self, link: socket.socket) -> Iterator[None]:
        """Within this context, `cancel` stops the program at the other end of `link`."""
        with self._link_lock:
            self._link = link
            if self.cancelled():
                self._stop_program()
        try:
            yield
        finally:
            with self._link_lock:
                self._link = None

    def finish(self, result: Result | None, error: BaseException | None = None) -> None:
        """Set the outcome, unless it was cancelled."""
        if not self.set_running_or_notify_cancel():
            return
        if error is not None:
            self.set_exception(error)
        elif result is not None:
            self.set_result(result)

    def _stop_program(self) -> None:
        if self._link is not None:
            with contextlib.suppress(OSError):  # the supervisor has closed its end
                self._link.shutdown(socket.SHUT_WR)


class Session:
    """A Python process that keeps its variables from cell to cell, like a notebook. Not thread-safe."""

    def __init__(self, link: socket.socket, limits: Limits) -> None:
        self._link = link
        self._owner = os.getpid()
        self._limits = limits
        cpu_s = limits.cpu_s and limits.cpu_seconds()
        send_job(link, {**job_header(limits, cpu_s), "session": True}, [], GRACE_SECONDS)
        self.alive = True

    def execute(self, code: str, wall_s: float | None = None) -> Result:
        """Run one cell; the value of its last expression is printed to stdout.

        A cell that takes longer than `wall_s` is interrupted (KeyboardInterrupt; the session continues). If it does not
        stop, the session is killed: `alive` is False then, and further cells are refused.
        """
        if not self.alive:
            return Result("refused", stderr="the session has ended; its variables are lost")
        wall_s = self._limits.wall_s if wall_s is None else wall_s
        send_job(self._link, {"cell": code, "wall_s": wall_s}, [], wall_s + GRACE_SECONDS)
        result, self.alive = receive_result(self._link)
        return result

    def interrupt(self) -> None:
        """Interrupt the running cell, as Ctrl-C does. Called from another thread."""
        with contextlib.suppress(OSError):
            streams.send(self._link, {"interrupt": True})

    def close(self) -> None:
        """Kill the session and all its processes; a thread that waits for a cell gets its result now."""
        self.alive = False
        if self._owner == os.getpid():  # a forked process only closes its copy of the connection
            with contextlib.suppress(OSError):
                self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def job_header(limits: Limits, cpu_s: int | float | None) -> dict[str, Any]:
    names = ("wall_s", "memory_mb", "file_mb", "processes", "output_bytes", "compile_s")
    return {"session": False, "limits": {**{name: getattr(limits, name) for name in names}, "cpu_s": cpu_s}}


def send_job(link: socket.socket, job: dict[str, Any], blobs: Sequence[bytes], timeout: float) -> None:
    """Send a job. If the supervisor has ended, `receive_result` reports it."""
    link.settimeout(timeout)
    with contextlib.suppress(OSError):
        streams.send(link, job, blobs)


def receive_result(link: socket.socket) -> tuple[Result, bool]:
    """Wait for the result of a job; and whether the session continues."""
    try:
        header, (stdout, stderr, *rest), _ = streams.receive(link)
    except (EOFError, OSError) as error:
        reason = "did not answer in time" if isinstance(error, TimeoutError) else "was killed"
        return Result("error", -9, stderr=f"[sandbox] the supervisor of this run {reason}"), False
    result = _result(header, stdout, stderr)
    if header["compile"] is not None:
        result.compile, rest = _result(header["compile"], rest[0], rest[1]), rest[2:]
    result.files = dict(zip(header["files"], rest, strict=True))
    return result, bool(header.get("alive"))


def _result(header: Mapping[str, Any], stdout: bytes, stderr: bytes) -> Result:
    texts = (stdout.decode(errors="replace"), stderr.decode(errors="replace"))
    return Result(header["status"], header["return_code"], *texts, header["seconds"])
