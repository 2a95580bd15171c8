"""Several training runs on one device that execute their steps in turn: A B C A B C … (see `rollout_modes.py`).

Every run is a program of its own, which calls `StepGate.wait` before every step. It waits there for the coordinator,
so clock and temperature drift of the device affects all runs alike and only one run computes at any time.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from verl.utils.process_tree import kill_tree

_ACCEPT_TIMEOUT_S = 0.5
_EXIT_TIMEOUT_S = 60.0
_LOG_TAIL = 4000


@dataclass
class Run:
    """One program and its connection."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    stream: TextIO | None = None
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.folder / f"{self.name}.log"

    def start(self, address: Path) -> None:
        environment = {**self.environment, "STEP_GATE": str(address), "STEP_GATE_NAME": self.name}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command, cwd=self.folder, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def failure(self, reason: str) -> RuntimeError:
        """An error with the end of the run's log."""
        return RuntimeError(f"{self.name}: {reason}\n{self.log.read_text(errors='replace')[-_LOG_TAIL:]}")


class InterleavedRuns:
    """Context manager: starts all runs, and kills those that are still alive at the end."""

    def __init__(self, runs: Sequence[Run], start_timeout: float, step_timeout: float) -> None:
        self._runs = {run.name: run for run in runs}
        self._start_timeout, self._step_timeout = start_timeout, step_timeout

    def __enter__(self) -> InterleavedRuns:
        # Addresses of Unix sockets are limited to about 100 characters.
        self._scratch = tempfile.TemporaryDirectory(prefix="gate")
        address = Path(self._scratch.name) / "socket"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(address))
        self._listener.listen(len(self._runs))
        self._listener.settimeout(_ACCEPT_TIMEOUT_S)
        try:
            for run in self._runs.values():
                run.start(address)
            self._accept_all()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        for run in self._runs.values():
            if run.process is not None and run.process.poll() is None:
                kill_tree(run.process.pid)
                run.process.wait()
        self._listener.close()
        self._scratch.cleanup()

    def _accept_all(self) -> None:
        """Wait until every run is ready for its first step."""
        deadline = time.monotonic() + self._start_timeout
        while missing := [run for run in self._runs.values() if run.stream is None]:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                for run in missing:
                    assert run.process is not None
                    if run.process.poll() is not None:
                        raise run.failure(f"exited with code {run.process.returncode} before its first step") from None
                    if time.monotonic() > deadline:
                        raise run.failure(f"not ready after {self._start_timeout:.0f} s") from None
                continue
            connection.settimeout(self._step_timeout)
            stream = connection.makefile("rw", encoding="utf-8")
            if name := stream.readline().strip():  # nothing: the run has ended, which is noticed above
                self._runs[name].stream = stream

    def interleave(self, rounds: int, deadline: float) -> int:
        """Let every run execute `rounds` steps in turn; return the completed rounds. No round starts after `deadline`
        (`time.monotonic()`). The first run of a round changes from round to round."""
        runs = list(self._runs.values())
        for done in range(rounds):
            if time.monotonic() > deadline:
                return done
            first = done % len(runs)
            for run in (*runs[first:], *runs[:first]):
                self._step(run)
        return rounds

    def _step(self, run: Run) -> None:
        """Release one run, and return when it waits for its next step."""
        assert run.stream is not None
        try:
            self._release(run)
            answer = run.stream.readline()
        except TimeoutError:
            raise run.failure(f"a step took more than {self._step_timeout:.0f} s") from None
        except ConnectionError:
            answer = ""
        if not answer:
            raise run.failure("ended before its last step")

    def _release(self, run: Run) -> None:
        assert run.stream is not None
        run.stream.write("go\n")
        run.stream.flush()

    def finish(self) -> list[RuntimeError]:
        """Let every run execute its last step, all at the same time, and exit; return the failures."""
        failures = []
        for run in self._runs.values():
            with suppress(ConnectionError):  # the run has ended: its exit code is checked below
                self._release(run)
        for run in self._runs.values():
            assert run.process is not None
            try:
                if code := run.process.wait(_EXIT_TIMEOUT_S):
                    failures.append(run.failure(f"exited with code {code} after the measurement"))
            except subprocess.TimeoutExpired:
                failures.append(run.failure(f"still running {_EXIT_TIMEOUT_S:.0f} s after its last step was allowed"))
        return failures


def environment_for(tree: Path) -> dict[str, str]:
    """The environment of a run that imports `verl` from `tree` and the files of this folder."""
    inherited = [path] if (path := os.environ.get("PYTHONPATH")) else []
    path = os.pathsep.join([str(tree), str(Path(__file__).parent), *inherited])
    own = {"PYTHONPATH": path, "STEP_GATE_TREE": str(tree.resolve()), "HF_HUB_OFFLINE": "1"}
    return {"RAY_ADDRESS": "local", **os.environ, **own}
