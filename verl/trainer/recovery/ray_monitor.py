"""Monitoring of a run on Ray by its driver: Ray's own processes, the controller's actor, and the errors of both.

Ray processes that the driver has started do not receive its signals, are monitored, and are killed with it. Exceptions
of the controller are raised in the driver with their own type and cause.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from verl.trainer.recovery.signals import StopRequest
from verl.trainer.recovery.supervised_process import report_to_supervisor
from verl.utils.concurrency import run_in_thread
from verl.utils.exceptions import PicklableError, RemoteTraceback
from verl.utils.process_tree import children, kill_tree, why_not_running
from verl.utils.resources import load_factor

logger = logging.getLogger(__name__)

# Ray cannot run without these.
_ESSENTIAL = ("gcs_server", "raylet")
_POLL_S = 1.0
# Failed connections after which the GCS counts as lost: refused if it is dead, unanswered if the network is lost, which
# may recover.
_MAX_REFUSED, _MAX_UNANSWERED = 3, 12

_WARN_AFTER_S = 5.0
# Time limits for a stopped process, which does not recover by itself, and for a silent one, which may be busy.
_STOPPED_S, _SILENT_S = 60.0, 300.0
# If more time passes between two polls, the machine or the job was suspended.
_SUSPENDED_S = 10.0
# Time for the controller to raise its own HangError, which has a traceback.
_CONTROLLER_ERROR_S = 5.0
# Time limit for requesting a status while a stop signal is handled.
_REFRESH_S = 2.0
_CONTROLLER = "TaskRunner"
_STOPPED_STATES = {"stopped": "stopped (SIGSTOP)", "traced": "stopped by a debugger"}

Result = TypeVar("Result")


class RayLostError(RuntimeError):
    """Ray's own processes have ended, so that the run cannot continue."""


STALE_CLUSTER = "A stale cluster is the usual cause: run `ray stop`, then `ray start --head`, and try again."


class RayUnavailableError(PicklableError, RuntimeError):
    """Ray could not be started or joined; the message has the remedy."""

    def __init__(self, reason: str, remedy: str = STALE_CLUSTER) -> None:
        self.reason = reason
        super().__init__(f"Ray cannot start or join its cluster ({reason}). {remedy}")


class RayProcesses:
    """The Ray processes that this process has started; empty (False) if a running cluster was joined.

    `kill` ends them. Of a joined cluster only the GCS can be monitored.
    """

    def __init__(self, pids: Sequence[int] = (), gcs: str | None = None) -> None:
        """`gcs`: the address of the cluster's control service (GCS)."""
        self._names = {pid: _process_name(pid) for pid in pids}
        self._running = set(pids)
        self._gcs, self._gcs_failures = gcs, 0.0  # at 1.0 the GCS counts as lost

    def __bool__(self) -> bool:
        return bool(self._names)

    def describe_lost(self, signalled: bool = False) -> str | None:
        """Return a description of an essential process that has ended, or of an unreachable GCS; None if Ray runs.

        `signalled`: a stop signal arrived, which Ray's processes may have received too. Then the end of any process is
        reported, because essential processes take longer to exit.
        """
        ended = [pid for pid in self._names if why_not_running(pid) in ("gone", "ended")]
        fatal = [pid for pid in ended if self._names[pid] in _ESSENTIAL or (signalled and pid in self._running)]
        if not signalled:
            self._running.difference_update(ended)
        if fatal:
            return f"{self._names[fatal[0]]}, pid {fatal[0]}"
        return None if self._gcs_answers() else f"nothing answers at {self._gcs}, the address of its GCS"

    def _gcs_answers(self) -> bool:
        """Connect to the GCS; return False after several consecutive failures. Ray itself would wait for a minute."""
        host, _, port = (self._gcs or "").rpartition(":")
        if port:
            try:
                socket.create_connection((host, int(port)), timeout=_POLL_S).close()
                self._gcs_failures = 0.0
            except ConnectionRefusedError:
                self._gcs_failures += 1 / _MAX_REFUSED
            except OSError:
                self._gcs_failures += 1 / _MAX_UNANSWERED
        return self._gcs_failures < 0.99

    def describe_stopped(self) -> str | None:
        """Return a description of an essential process that is stopped (SIGSTOP); None if all of them run."""
        pids = [pid for pid, name in self._names.items() if name in _ESSENTIAL and why_not_running(pid) == "stopped"]
        return f"Ray's {self._names[pids[0]]} (pid {pids[0]}) is stopped (SIGSTOP)" if pids else None

    def kill(self) -> None:
        """Kill all processes, including Ray's workers."""
        for pid in self._names:
            kill_tree(pid)


@contextmanager
def separate_process_groups() -> Iterator[list[int]]:
    """Context in which forked processes get their own process groups. The yielded list contains their pids at the end.

    A signal to the group of this process (from a scheduler, `timeout`, a closing terminal) then does not reach them, so
    that the current step can be finished. Fork hooks run in subprocesses with a `preexec_fn`, like those of Ray.
    """
    global _separate_groups
    known = set(children(os.getpid()))
    started: list[int] = []
    _separate_groups = True
    try:
        yield started
    finally:
        _separate_groups = False
        started += [pid for pid in children(os.getpid()) if pid not in known]


_separate_groups = False


def _leave_group() -> None:
    if _separate_groups:
        os.setpgid(0, 0)


os.register_at_fork(after_in_child=_leave_group)


def _process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def await_controller(
    call: Any, processes: RayProcesses, request: StopRequest, on_poll: Callable[[], None] = lambda: None
) -> Any:
    """Return the result of a method of the controller; raise its own exception, or WorkerDiedError if its process died.

    `on_poll` is called every second. Raises RayLostError if Ray's processes end: Ray itself would wait a minute and
    then kill this process without a message.
    """
    import ray

    while not ray.wait([call], timeout=_POLL_S, fetch_local=False)[0]:
        _check_ray(processes, request)
        on_poll()
    try:
        return ray.get(call)
    except ray.exceptions.RayTaskError as error:
        raised = _own_exception(error)
    except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
        from verl.single_controller.base.worker_group import WorkerDiedError

        died = "the controller's process died"
        if request.signal is not None:  # Ray has received the signal, too
            raise _ray_lost(died, processes, request) from error
        raised = WorkerDiedError(died, _CONTROLLER, 0, "of the controller", "run", str(error))
    raise raised


def run_monitored(act: Callable[[], Result], processes: RayProcesses, request: StopRequest) -> Result:
    """Call `act` in a thread and return its result; raise RayLostError immediately if Ray's processes end."""
    done = run_in_thread("run", act, join_at_exit=False)
    while not wait([done], timeout=_POLL_S).done:
        _check_ray(processes, request)
    return done.result()


class ControllerMonitor:
    """Polls the status of the controller and of Ray's processes, without blocking; raises HangError if they hang.

    A user's own TaskRunner need not have `run_status`: then only processes are monitored.
    """

    def __init__(self, runner: Any, processes: RayProcesses, timeout: float | None) -> None:
        self._runner, self._processes, self._timeout = runner, processes, timeout
        self._pending: Any = None
        self._answered_at: float | None = None  # None: the controller has not started, so no answer is expected
        self._stopped: tuple[str, float] | None = None
        self._hang_seen_at: float | None = None
        self._warned_about: str | None = None
        self._polled_at = time.monotonic()
        self.status: Any = None
        """The last status received."""

    def before_first_step(self) -> bool:
        """Return whether the run has not begun its first step; False if the runner does not report its status.

        If the last status, which may be seconds old, is from before the first step, a new one is requested.
        """
        if not hasattr(self._runner, "run_status"):
            return False
        if self.status is None or getattr(self.status, "starting", False):
            self._refresh()
        return self.status is None or getattr(self.status, "starting", False)

    def _refresh(self) -> None:
        import ray

        try:
            self.status = ray.get(self._runner.run_status.remote(), timeout=_REFRESH_S)
        except ray.exceptions.RayError as error:
            logger.debug("the controller did not report its status within %.0f s: %r", _REFRESH_S, error)

    def poll(self) -> None:
        """Request a status or receive the pending one; raise HangError if the controller or Ray hangs."""
        before, self._polled_at = self._polled_at, time.monotonic()
        now = self._polled_at
        if now - before > _SUSPENDED_S:
            self._answered_at, self._stopped = self._answered_at and now, None
        self._receive_status(now)
        hang = getattr(self.status, "hang", None)
        if hang is not None:
            self._hang_seen_at = self._hang_seen_at or now
            if now - self._hang_seen_at >= _CONTROLLER_ERROR_S:
                raise hang
        self._check_processes(now)

    def _receive_status(self, now: float) -> None:
        import ray

        if not hasattr(self._runner, "run_status"):
            return
        if self._pending is None:
            self._pending = self._runner.run_status.remote()
        if ray.wait([self._pending], timeout=0, fetch_local=False)[0]:
            pending, self._pending, self._answered_at = self._pending, None, now
            try:
                self.status = ray.get(pending, timeout=1)
            except ray.exceptions.RayError as error:
                logger.debug("the controller does not report its status: %r", error)  # its run raises the cause
            else:
                if self.status.total:
                    report_to_supervisor(step=self.status.step + 1, phase=self.status.phase)

    def _check_processes(self, now: float) -> None:
        pid = getattr(self.status, "pid", 0)
        is_local = pid and self.status.host == socket.gethostname()
        reason, limit = self._processes.describe_stopped(), self._timeout or _STOPPED_S
        if reason is None and is_local and (state := why_not_running(pid)) in _STOPPED_STATES:
            reason = f"the controller (TaskRunner, pid {pid}) is {_STOPPED_STATES[state]}"
            limit = math.inf if state == "traced" else limit  # no limit while a debugger is attached
        if reason is None:
            self._stopped = None
            return self._check_silence(now, pid if is_local else 0)
        if self._stopped is None or self._stopped[0] != reason:
            self._stopped = reason, now
        self._answered_at = self._answered_at and now  # a stopped controller cannot answer
        self._warn_or_raise(reason, now - self._stopped[1], limit, _WARN_AFTER_S)

    def _check_silence(self, now: float, pid: int) -> None:
        seconds = 0.0 if self._answered_at is None else now - self._answered_at
        if seconds < _WARN_AFTER_S:
            self._warned_about = None
            return
        limit = self._timeout or _SILENT_S * load_factor()
        if seconds >= limit or (seconds >= limit / 2 and self._warned_about is None):
            reason, detail = self._describe_silence(pid)
            self._warn_or_raise(reason, seconds, limit, 0.0, detail)

    def _describe_silence(self, pid: int) -> tuple[str, str]:
        """Return a sentence and the stacks of the controller, if it runs on this machine."""
        from verl.trainer.recovery.hang_diagnosis import diagnose_controller
        from verl.utils.stacks import show, stacks_of

        name = f"the controller (TaskRunner{f', pid {pid}' if pid else ''}) does not answer"
        stacks = stacks_of(pid) if pid else {}
        if not stacks:
            return name, ""
        # The training thread has the most frames of this package.
        main = max(stacks.values(), key=lambda stack: sum(frame.origin == "verl" for frame in stack))
        return diagnose_controller(main, f"{name}: it").sentence, "\n\n".join(map(show, stacks.values()))

    def _warn_or_raise(self, reason: str, seconds: float, limit: float, warn_after: float, detail: str = "") -> None:
        if seconds >= limit:
            from verl.single_controller.base.worker_group import HangError

            pid, host = getattr(self.status, "pid", 0), getattr(self.status, "host", "?")
            if pid and host == socket.gethostname():
                kill_tree(pid)
            self._processes.kill()
            summary = f"the run has hung for {seconds:.0f} s: {reason}"
            error = HangError(summary, _CONTROLLER, 0, f"{host} pid {pid}", "run", detail)
            error.exit_immediately = True
            if getattr(self.status, "phase", ""):
                error.phase, error.step = self.status.phase, self.status.step + 1
            raise error
        if seconds >= warn_after and self._warned_about != reason:
            self._warned_about = reason
            time_limit = "" if limit == math.inf else f" Time limit: {limit:.0f} s."
            logger.warning("the run has waited for %.0f s: %s.%s", seconds, reason, time_limit)


def _check_ray(processes: RayProcesses, request: StopRequest) -> None:
    """Send a heartbeat to the supervisor; raise RayLostError if Ray's processes have ended."""
    report_to_supervisor(heartbeat=True)
    if (lost := processes.describe_lost(signalled=request.signal is not None)) is not None:
        raise _ray_lost(f"Ray's own processes ended ({lost})", processes, request)


def _ray_lost(what: str, processes: RayProcesses, request: StopRequest) -> RayLostError:
    processes.kill()
    after = f" after {request.signal} to all processes of the run" if request.signal else ""
    return RayLostError(f"{what}{after}: the current step is lost.")


def _own_exception(error: Any) -> Exception:
    """Return the exception that the actor raised, without Ray's wrapper; its last cause has the actor's traceback."""
    import ray

    text = str(error)
    while isinstance(error, ray.exceptions.RayTaskError):
        error = error.cause
    if not isinstance(error, Exception) or isinstance(error, ray.exceptions.RayError):
        # The exception cannot be unpickled here, or is an exception of Ray: use the last line of the traceback.
        cause, error = error, RuntimeError(text.strip().splitlines()[-1])
        error.__cause__ = cause if isinstance(cause, Exception) else None
    first: BaseException = error
    while first.__cause__ is not None:
        first = first.__cause__
    first.__cause__ = RemoteTraceback(text)
    return error
