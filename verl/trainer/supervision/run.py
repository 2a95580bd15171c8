"""One attempt of a supervised run: a child that leads a process group of its own and dies with its supervisor."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from contextlib import suppress

from verl.trainer.supervision.forward import Forwarded
from verl.trainer.supervision.policy import Ending
from verl.trainer.supervision.report import Reports
from verl.trainer.supervision.terminal import JOB_CONTROL, go_on, take_back
from verl.utils.process_tree import continue_with_parent_death, why_not_running, with_descendants

_LOOK_S = 0.2
# Whoever stopped it may let it go on; after this it is taken for dead.
_STOPPED_S = 5.0
_SILENT_S = 60.0
# What a command that is done may take to exit.
_ENDING_S = 30.0
# Between two looks. Longer, and nobody could run: the machine, or the job, was suspended.
_PAUSED_S = 5.0


class Run:
    """The supervisor's view of its child."""

    def __init__(self, pid: int, reports: Reports, forwarded: Forwarded) -> None:
        self.pid = pid
        self.cause: str | None = None
        """Why the supervisor killed it."""
        self._reports, self._forwarded = reports, forwarded
        self._beat: float | None = None
        self._stopped: float | None = None
        self._looked = time.monotonic()

    @classmethod
    def fork(cls, forwarded: Forwarded, earlier: int) -> Run | None:
        """None in the child, of which there were some earlier."""
        sys.stdout.flush()
        sys.stderr.flush()
        reports, parent = Reports(), os.getpid()
        # A signal before the child has its own handlers would be forwarded by it.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            forwarded.__exit__(None, None, None)
            reports.hand_over(earlier)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            continue_with_parent_death()
            threading.Thread(target=_end_with, args=(parent,), name="end with the supervisor", daemon=True).start()
            return None
        with suppress(OSError):  # the child was faster
            os.setpgid(pid, pid)
        reports.receive()
        forwarded.child = pid
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return cls(pid, reports, forwarded)

    @property
    def step(self) -> int | None:
        """The step that it said last to be under way."""
        told = self._reports.latest
        return told.get("ending", {}).get("step") or told.get("step")

    @property
    def last_lines(self) -> list[str]:
        """What it would have said last, had it known that nobody starts it again."""
        return list(self._reports.latest.get("lines", []))

    @property
    def has_spoken(self) -> bool:
        """It came to its own end, so it has said why; or left that to us (`last_lines`)."""
        return "ending" in self._reports.latest

    def wait(self) -> int:
        """Until it has ended, or was killed for a reason (`cause`); its exit code, negative for a signal."""
        code = None
        while code is None:
            if self._reports.read(_LOOK_S):
                self._beat = time.monotonic()
            code = self._look()
            if code is None and (self._forwarded.at_once or self._is_lost()):
                self._kill()
        self._reports.read(0)
        self._reports.close()
        self._forwarded.child = None
        take_back(self.pid)
        if self.has_spoken and "leaving" in self._reports.latest and code < 0:  # it was done but for its exit
            return int(self._reports.latest["ending"]["cause"] is not None)
        return code

    def ending(self, code: int) -> Ending | None:
        """How it ended; None: well, or as it was asked to."""
        if code == 0:
            return None
        told = self._reports.latest.get("ending")
        if told is not None and told["cause"] is not None:
            return Ending(told["cause"], told["restartable"], told["place"])
        died = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        words = "" if code < 0 or told is not None else ", without a word"
        # A run that has ended well needs no other attempt, whatever the script did after it.
        return Ending(self.cause or f"the driver (pid {self.pid}) {died}{words}", restartable=told is None)

    def _look(self) -> int | None:
        """Take what the system says of all children; the exit code of this one, if it has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:  # somebody else waited for it
                return 1
            if pid == 0:
                return None
            if pid != self.pid:  # an orphan of the run
                continue
            if os.WIFSTOPPED(status) and os.WSTOPSIG(status) in JOB_CONTROL:
                go_on(self.pid)
            elif os.WIFSTOPPED(status):
                self._stopped = time.monotonic()
            elif os.WIFCONTINUED(status):
                self._stopped, self._beat = None, None
            else:
                return os.waitstatus_to_exitcode(status)

    def _is_lost(self) -> bool:
        """Whether nothing will come of it any more; `cause` says why."""
        before, self._looked = self._looked, time.monotonic()
        now = self._looked
        if now - before > _PAUSED_S:
            self._beat, self._stopped = self._beat and now, self._stopped and now
        if self._stopped is not None and now - self._stopped > _STOPPED_S:
            self.cause = (
                f"the driver (pid {self.pid}) was stopped (SIGSTOP) and nobody let it go on for {_STOPPED_S:.0f} s"
            )
        elif self._stopped is None and self._beat is not None:
            limit = _ENDING_S if "leaving" in self._reports.latest else math.inf if self.has_spoken else _SILENT_S
            if now - self._beat > limit and why_not_running(self.pid) != "traced":
                self.cause = f"the driver (pid {self.pid}) gave no sign of life for {limit:.0f} s"
        return self.cause is not None

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def _end_with(parent: int) -> None:
    """When the supervisor is killed, nobody else ends what this process started: agents of Ray outlive all others."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    for pid in reversed(with_descendants(os.getpid())):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
