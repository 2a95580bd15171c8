"""StepGate: a run's connection to the coordinator that decides when its next step starts (`rollout_modes.py`)."""

from __future__ import annotations

import os
import socket


class StepGate:
    """Connects to the Unix socket STEP_GATE, under the name STEP_GATE_NAME."""

    def __init__(self) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(os.environ["STEP_GATE"])
        self._stream = self._connection.makefile("rw", encoding="utf-8")

    def wait(self) -> None:
        """Report that the previous step has ended, and block until the next one may start."""
        self._stream.write(os.environ["STEP_GATE_NAME"] + "\n")
        self._stream.flush()
        if not self._stream.readline():
            raise ConnectionError("the coordinator of the benchmark has closed the connection")
