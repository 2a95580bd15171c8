"""The processes of a run, as its keeper sees them from outside, and their entries in /proc."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

# A look that takes longer stops the program meanwhile: it could make looks slow, and use up memory during them.
_PATIENCE_SECONDS = 0.01


class Family:
    """All that descends from a run's init. `proc`: the host's /proc; None: nothing is known."""

    def __init__(self, proc: int | None) -> None:
        self.proc = proc
        self._was_slow = False

    def members(self, init: int) -> list[int]:
        """The program and all that descends from it, with their numbers on the host."""
        found = list(dict.fromkeys(self.children(init)))
        for member in found:  # one whose parent ends meanwhile may show up twice
            found += set(self.children(member)).difference(found)
        return found

    def children(self, pid: int) -> list[int]:
        """Of all its threads: each knows only those that it started itself."""
        return [
            int(child)
            for thread in self.names(f"{pid}/task")
            for child in self.read(f"{pid}/task/{thread}/children").split()
        ]

    def fields(self, pid: int, file: str) -> dict[str, int]:
        """The numbers of `status` or `smaps_rollup`, by name; sizes are in kilobytes. Empty: it has ended."""
        found: dict[str, int] = {}
        for line in self.read(f"{pid}/{file}").splitlines():
            name, _, value = line.partition(":")
            number = value.split(None, 1)[:1]
            if number and number[0].isdigit():
                found[name] = int(number[0])
        return found

    def signal(self, members: list[int], number: signal.Signals) -> None:
        for member in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(member, number)

    @contextlib.contextmanager
    def stopped_if_slow(self, init: int) -> Iterator[Callable[[], None]]:
        """The value, called now and then, stops all members until the end of the context if it lasts too long, and from
        the start if the last one did."""
        began = time.monotonic()
        patience = 0.0 if self._was_slow else _PATIENCE_SECONDS
        stopped: list[int] = []

        def check_time() -> None:
            if not stopped and time.monotonic() - began >= patience:
                while further := [pid for pid in self.members(init) if pid not in stopped]:
                    self.signal(further, signal.SIGSTOP)
                    stopped.extend(further)

        try:
            check_time()
            yield check_time
        finally:
            self.signal(stopped, signal.SIGCONT)
            self._was_slow = time.monotonic() - began > _PATIENCE_SECONDS

    def threads_of_user(self) -> int:
        """Processes and threads of this user, whether of this run or not."""
        count = 0
        for name in self.names("."):
            with contextlib.suppress(OSError, IndexError):
                if name.isdigit() and os.stat(name, dir_fd=self.proc).st_uid == os.getuid():
                    count += int(self.read(f"{name}/status").partition("Threads:")[2].split()[0])
        return count

    def names(self, folder: str) -> list[str]:
        if self.proc is None:
            return []
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.proc)
        except OSError:
            return []
        try:
            return os.listdir(descriptor)
        except OSError:  # ended meanwhile
            return []
        finally:
            os.close(descriptor)

    def read(self, path: str) -> str:
        if self.proc is None:
            return ""
        try:
            descriptor = os.open(path, os.O_RDONLY, dir_fd=self.proc)
        except OSError:
            return ""
        with open(descriptor, encoding="utf-8", errors="replace") as file:
            try:
                return file.read()
            except OSError:
                return ""
