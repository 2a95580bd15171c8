"""What a supervised run tells the process that supervises it: JSON lines through a pipe that it inherits."""

from __future__ import annotations

import json
import os
import select
from contextlib import suppress
from typing import Any

_pipe: int | None = None
_earlier = 0


def tell(**fields: Any) -> None:
    """`beat` (alive), `step` and `phase` (under way), `ending` and `lines` (how the run ends; the first one counts),
    `leaving` (nothing is left to do but to exit: a script may go on after its run).

    Nothing where nobody supervises. It never waits: what does not fit into the pipe is lost.
    """
    if _pipe is not None:
        with suppress(OSError):  # the supervisor is gone, and this process soon will be
            os.write(_pipe, json.dumps(fields, default=str).encode() + b"\n")


def is_supervised() -> bool:
    """Whether a process waits for this one and may start it again."""
    return _pipe is not None


def earlier_attempts() -> int:
    """How often the run was started before."""
    return _earlier


class Reports:
    """The supervisor's end of the pipe; `latest` has the newest value of every field."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        self._rest = b""
        self.latest: dict[str, Any] = {}

    def hand_over(self, earlier: int) -> None:
        """In the child: what it tells goes here."""
        global _pipe, _earlier
        os.close(self._reading)
        _pipe, _earlier = self._writing, earlier

    def receive(self) -> None:
        """In the supervisor: only the child writes."""
        os.close(self._writing)

    def read(self, wait: float) -> bool:
        """Take what came, or comes within `wait` seconds; whether anything did."""
        data = b""
        if select.select([self._reading], [], [], wait)[0]:
            with suppress(BlockingIOError):
                data = os.read(self._reading, 1 << 20)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            with suppress(ValueError):  # a line that did not fit
                for name, value in json.loads(line).items():
                    if name not in ("ending", "lines") or name not in self.latest:
                        self.latest[name] = value
        return bool(lines)

    def close(self) -> None:
        os.close(self._reading)
