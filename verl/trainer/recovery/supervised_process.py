"""One attempt of a supervised run: a child process with its own process group and a pipe for reports to its supervisor.

The child becomes the foreground process group while it uses the terminal. It dies with its supervisor.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from verl.trainer.recovery.signals import SignalForwarder, StopSignal
from verl.utils.process_tree import continue_with_parent_death, why_not_running, with_descendants

_POLL_S = 0.2
# A child that stays stopped (SIGSTOP) for this time counts as dead.
_SIGSTOP_LIMIT_S = 5.0
# A child without a heartbeat for this time counts as dead.
_HEARTBEAT_LIMIT_S = 60.0
# Time limit for the exit of a child that has finished its work.
_EXIT_LIMIT_S = 30.0
# Time limit for the exit of a child that received a stop signal before its first step: there is nothing to save.
_STARTUP_EXIT_LIMIT_S = 5.0
# If more time passes between two polls, the machine or the job was suspended.
_SUSPENDED_S = 5.0

_JOB_CONTROL = tuple(getattr(signal, name) for name in ("SIGTSTP", "SIGTTIN", "SIGTTOU") if hasattr(signal, name))
_STDIN = 0
_SHOW_CURSOR = "\x1b[?25h"

# In the child: the pipe to its supervisor, and the number of attempts before this one.
_pipe: int | None = None
_previous_attempts = 0


@dataclass(frozen=True)
class AttemptFailure:
    """How an attempt failed."""

    cause: str
    """One sentence, without a final period."""
    restartable: bool
    """Whether another attempt may succeed."""
    location: str | None = None
    """Step, phase and role of the failure, if known. Two failures at the same location have the same cause."""


def report_to_supervisor(**fields: Any) -> None:
    """Send these fields to the supervisor; no effect without one. Never blocks: a report that does not fit into the
    pipe is dropped.

    Fields: `starting`: this process prepares the first step; `heartbeat`; current `step` and `phase`; `ending` (how
    the run ended) and `lines` (error message); only the first report of these counts; `exiting`: the process exits
    immediately after the run.
    """
    if _pipe is not None:
        with suppress(OSError):  # the supervisor is gone, and this process soon will be
            os.write(_pipe, json.dumps(fields, default=str).encode() + b"\n")


def is_supervised() -> bool:
    """Return whether this process is the child of a supervisor, which may restart it."""
    return _pipe is not None


def previous_attempts() -> int:
    """Return how often the run was started before."""
    return _previous_attempts


@contextmanager
def before_first_step() -> Iterator[None]:
    """Context of the start of a training run: set `before_first_step` of a StopSignal, and report `starting` to the
    supervisor, which then limits the time to stop.

    While this process connects to Ray, Ray replaces the handler of SIGTERM by one that raises SystemExit.
    """
    report_to_supervisor(starting=True)
    try:
        yield
    except StopSignal as error:
        error.before_first_step = True
        raise
    except SystemExit as error:
        if error.code == signal.SIGTERM:
            raise StopSignal("SIGTERM", before_first_step=True) from None
        raise
    else:
        report_to_supervisor(starting=False)


class SupervisedProcess:
    """The child, as seen by the supervisor."""

    def __init__(self, pid: int, reports: _StatusPipe, forwarder: SignalForwarder) -> None:
        self.pid = pid
        self._reports, self._forwarder = reports, forwarder
        self.was_stuck_in_start = False
        """The child was killed because a stop signal did not end it before its first step."""
        self._kill_reason: str | None = None
        self._last_report: float | None = None
        self._stopped_at: float | None = None
        self._polled_at = time.monotonic()

    @classmethod
    def fork(cls, forwarder: SignalForwarder, attempts: int) -> SupervisedProcess | None:
        """Fork an attempt after `attempts` earlier ones. Returns None in the child."""
        sys.stdout.flush()
        sys.stderr.flush()
        reports, parent = _StatusPipe(), os.getpid()
        # Signals are blocked until the child has restored its handlers: until then it would forward them.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            forwarder.restore_handlers()
            reports.open_in_child(attempts)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            continue_with_parent_death()
            threading.Thread(target=_exit_with_parent, args=(parent,), name="exit-with-supervisor", daemon=True).start()
            return None
        with suppress(OSError):  # the child was faster
            os.setpgid(pid, pid)
        reports.open_in_supervisor()
        forwarder.child = pid
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return cls(pid, reports, forwarder)

    @property
    def step(self) -> int | None:
        """The last step that the child reported as running."""
        latest = self._reports.latest
        return latest.get("ending", {}).get("step") or latest.get("step")

    @property
    def final_lines(self) -> list[str]:
        """The error message that the supervisor prints instead of the child, unless it restarts the run."""
        return list(self._reports.latest.get("lines", []))

    @property
    def reported_ending(self) -> bool:
        """Whether the child has reported the end of its run, so that its error message was printed or is in
        `final_lines`."""
        return "ending" in self._reports.latest

    def wait(self) -> int:
        """Wait until the child has ended, killing it if it hangs; return its exit code, negative for a signal."""
        code = None
        while code is None:
            # A process that starts sends no heartbeats yet.
            if self._reports.read(_POLL_S) and self._reports.latest.keys() - {"starting"}:
                self._last_report = time.monotonic()
            code = self._poll()
            if code is None and (self._forwarder.received_twice or self._is_stuck_in_start() or self._is_lost()):
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
        self._reports.read(0)
        self._reports.close()
        self._forwarder.child = None
        _take_terminal_back(self.pid)
        if self.reported_ending and "exiting" in self._reports.latest and code < 0:  # killed during its exit
            return int(self._reports.latest["ending"]["cause"] is not None)
        return code

    def failure(self, code: int) -> AttemptFailure | None:
        """Return how the attempt failed; None if it succeeded or stopped as requested."""
        if code == 0:
            return None
        ending = self._reports.latest.get("ending")
        if ending is not None and ending["cause"] is not None:
            return AttemptFailure(ending["cause"], ending["restartable"], ending["location"])
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        silent = "" if code < 0 or ending is not None else ", without an error message"
        # If the run has succeeded (`ending` without a cause), the script failed after it: no other attempt.
        cause = self._kill_reason or f"the driver (pid {self.pid}) {ended}{silent}"
        return AttemptFailure(cause, restartable=ending is None)

    def _poll(self) -> int | None:
        """Handle the state changes of all children; return the exit code of this one if it has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:  # other code has already waited for the child
                return 1
            if pid == 0:
                return None
            if pid != self.pid:  # an adopted orphan of the run
                continue
            if os.WIFSTOPPED(status) and os.WSTOPSIG(status) in _JOB_CONTROL:
                _continue_after_job_control(self.pid)
            elif os.WIFSTOPPED(status):
                self._stopped_at = time.monotonic()
            elif os.WIFCONTINUED(status):
                self._stopped_at, self._last_report = None, None
            else:
                return os.waitstatus_to_exitcode(status)

    def _is_stuck_in_start(self) -> bool:
        """Return whether the child has not ended in time after a stop signal before its first step.

        Python's signal handlers do not run while the main thread is in a blocking call, for example of Ray.
        """
        starting = self._reports.latest.get("starting", False) and not self.reported_ending
        if starting and self._forwarder.received is not None:
            self.was_stuck_in_start |= time.monotonic() - self._forwarder.received_at > _STARTUP_EXIT_LIMIT_S
        return self.was_stuck_in_start

    def _is_lost(self) -> bool:
        """Return whether the child is stopped or silent for too long, and record that as the reason to kill it."""
        before, self._polled_at = self._polled_at, time.monotonic()
        now = self._polled_at
        if now - before > _SUSPENDED_S:
            self._last_report, self._stopped_at = self._last_report and now, self._stopped_at and now
        if self._stopped_at is not None and now - self._stopped_at > _SIGSTOP_LIMIT_S:
            self._kill_reason = (
                f"the driver (pid {self.pid}) was stopped (SIGSTOP) and not continued for {_SIGSTOP_LIMIT_S:.0f} s"
            )
        elif self._stopped_at is None and self._last_report is not None:
            limit = (
                _EXIT_LIMIT_S
                if "exiting" in self._reports.latest
                else math.inf
                if self.reported_ending
                else _HEARTBEAT_LIMIT_S
            )
            if now - self._last_report > limit and why_not_running(self.pid) != "traced":
                self._kill_reason = f"the driver (pid {self.pid}) sent no heartbeat for {limit:.0f} s"
        return self._kill_reason is not None


class _StatusPipe:
    """The pipe from the child to its supervisor. `latest`: last reported value of every field."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        self._incomplete = b""
        self.latest: dict[str, Any] = {}

    def open_in_child(self, attempts: int) -> None:
        """From now on `report_to_supervisor` writes to this pipe."""
        global _pipe, _previous_attempts
        os.close(self._reading)
        _pipe, _previous_attempts = self._writing, attempts

    def open_in_supervisor(self) -> None:
        """Close the end that only the child writes to."""
        os.close(self._writing)

    def read(self, timeout: float) -> bool:
        """Read the lines that arrive within `timeout` seconds; return whether there were any."""
        data = b""
        if select.select([self._reading], [], [], timeout)[0]:
            with suppress(BlockingIOError):
                data = os.read(self._reading, 1 << 20)
        *lines, self._incomplete = (self._incomplete + data).split(b"\n")
        for line in lines:
            with suppress(ValueError):  # a line that was cut off
                for name, value in json.loads(line).items():
                    if name not in ("ending", "lines") or name not in self.latest:
                        self.latest[name] = value
        return bool(lines)

    def close(self) -> None:
        os.close(self._reading)


def _exit_with_parent(parent: int) -> None:
    """Wait until the supervisor is gone, then kill this process and its descendants, such as Ray's agents."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    for pid in reversed(with_descendants(os.getpid())):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _continue_after_job_control(child: int) -> None:
    """Continue a child whose process group was stopped by Ctrl-Z, or by reading or writing the terminal.

    In the foreground it gets the terminal, as shells do. Otherwise this process stops too, which the shell shows, and
    both continue when the shell continues this one.
    """
    if not _is_in_foreground():
        os.kill(os.getpid(), signal.SIGSTOP)
    if _is_in_foreground():
        _give_terminal_to(child)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGCONT)


def _take_terminal_back(child: int) -> None:
    """After the child's end: take the terminal back if it had it, and show the cursor, which progress bars hide."""
    with suppress(OSError):
        if os.tcgetpgrp(_STDIN) == child:
            _give_terminal_to(os.getpgrp())
    if sys.stderr.isatty():
        sys.stderr.write(_SHOW_CURSOR)
        sys.stderr.flush()


def _is_in_foreground() -> bool:
    try:
        return os.tcgetpgrp(_STDIN) == os.getpgrp()
    except OSError:  # no controlling terminal
        return False


def _give_terminal_to(group: int) -> None:
    with _ignored_sigttou(), suppress(OSError):
        os.tcsetpgrp(_STDIN, group)


@contextmanager
def _ignored_sigttou() -> Iterator[None]:
    """A background process would be stopped for changing the terminal."""
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTTOU, before)
