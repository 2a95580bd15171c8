"""The future of a submitted program; unlike a thread pool's, it can be cancelled while the program runs."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future

from verl.sandbox.outcome import Result


class RunFuture(Future[Result]):
    """A submitted program.

    `cancel()` returns True unless the result is set already. A queued program never starts. A running one is killed
    with all its processes: the call only closes the request side of the connection to the keeper and returns; the
    thread of `Sandbox.submit`, and so the program's slot, is released once the keeper has killed the process tree.
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
            with contextlib.suppress(OSError):  # the keeper has closed its end
                self._link.shutdown(socket.SHUT_WR)
