"""The processes of a Ray that this process started (out of the way of its signals, watched, ended with it), and the
run in one of its actors: what that raised is raised here, as itself and with its cause."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from verl.trainer.common.signals import Asked
from verl.trainer.supervision.report import tell
from verl.utils.exceptions import RemoteTraceback
from verl.utils.process_tree import children, kill_tree, why_not_running

# Without one of these there is no Ray.
_ESSENTIAL = ("gcs_server", "raylet")
_LOOK_S = 1.0
# A GCS that is gone refuses; a network that is away does not answer at all, and may be back.
_REFUSED, _UNANSWERED = 3, 12

Result = TypeVar("Result")


class OwnRay:
    """Of a cluster that was joined no process is ours: there is nothing to end, and only its GCS to watch."""

    def __init__(self, pids: Sequence[int] = (), gcs: str | None = None) -> None:
        """`gcs`: the address of what holds the cluster together."""
        self._names = {pid: _name(pid) for pid in pids}
        self._seen = set(pids)
        self._gcs, self._unanswered = gcs, 0.0  # the latter of 1

    def __bool__(self) -> bool:
        return bool(self._names)

    def lost(self, signalled: bool = False) -> str | None:
        """The process without which there is no Ray, if it has ended.

        `signalled`: we were asked to end, and any that ended since was too; the essential ones take longer to go.
        """
        ended = [pid for pid in self._names if why_not_running(pid) in ("gone", "ended")]
        fatal = [pid for pid in ended if self._names[pid] in _ESSENTIAL or (signalled and pid in self._seen)]
        if not signalled:
            self._seen.difference_update(ended)
        if fatal:
            return f"{self._names[fatal[0]]}, pid {fatal[0]}"
        return None if self._gcs_answers() else f"nothing answers at {self._gcs}, the address of its GCS"

    def _gcs_answers(self) -> bool:
        """Ray itself waits for a minute. Once may be an accident."""
        host, _, port = (self._gcs or "").rpartition(":")
        if port:
            try:
                socket.create_connection((host, int(port)), timeout=_LOOK_S).close()
                self._unanswered = 0.0
            except ConnectionRefusedError:
                self._unanswered += 1 / _REFUSED
            except OSError:
                self._unanswered += 1 / _UNANSWERED
        return self._unanswered < 0.99

    def stopped(self) -> str | None:
        """The process without which there is no Ray, if it is stopped."""
        found = [pid for pid, name in self._names.items() if name in _ESSENTIAL and why_not_running(pid) == "stopped"]
        return f"Ray's {self._names[found[0]]} (pid {found[0]}) is stopped (SIGSTOP)" if found else None

    def kill(self) -> None:
        """End all of it now, workers included."""
        for pid in self._names:
            kill_tree(pid)


@contextmanager
def started_apart() -> Iterator[list[int]]:
    """Processes started in this block lead process groups of their own, so that a signal to our group (of a scheduler,
    of `timeout`, of a terminal that closes) reaches us alone, and we can still finish with them; their pids are given.

    Ray forks with a hook of its own, and only then Python runs these; Ray's workers lead groups of theirs anyway.
    """
    global _apart
    known = set(children(os.getpid()))
    started: list[int] = []
    _apart = True
    try:
        yield started
    finally:
        _apart = False
        started += [pid for pid in children(os.getpid()) if pid not in known]


_apart = False


def _leave_group() -> None:
    if _apart:
        os.setpgid(0, 0)


os.register_at_fork(after_in_child=_leave_group)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


class RayLostError(RuntimeError):
    """Ray's own processes are gone, and with them the run."""


def result_of(call: Any, own: OwnRay, asked: Asked, look: Callable[[], None] = lambda: None) -> Any:
    """The result of a TaskRunner's method; its own exception, or WorkerDiedError where its process is gone.

    `look` is called every second meanwhile. Ray itself would wait a minute for its own processes, if they are gone,
    and then end this one without a word.
    """
    import ray

    while not ray.wait([call], timeout=_LOOK_S, fetch_local=False)[0]:
        _beat(own, asked)
        look()
    try:
        return ray.get(call)
    except ray.exceptions.RayTaskError as error:
        raised = _own_exception(error)
    except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
        from verl.single_controller.base.errors import WorkerDiedError

        died = "the controller's process died"
        if asked.by is not None:  # Ray was sent the signal too, and takes its time to go
            raise _lost(died, own, asked) from error
        raised = WorkerDiedError(died, "TaskRunner", 0, "of the controller", "run", str(error))
    raise raised


def watched(act: Callable[[], Result], own: OwnRay, asked: Asked) -> Result:
    """What `act` returns or raises; it runs beside, in a thread, so that RayLostError does not wait for it."""
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(act())
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            done.set_exception(error)

    threading.Thread(target=run, name="the run", daemon=True).start()
    while not wait([done], timeout=_LOOK_S).done:
        _beat(own, asked)
    return done.result()


def _beat(own: OwnRay, asked: Asked) -> None:
    tell(beat=True)
    if (lost := own.lost(signalled=asked.by is not None)) is not None:
        raise _lost(f"Ray's own processes ended ({lost})", own, asked)


def _lost(what: str, own: OwnRay, asked: Asked) -> RayLostError:
    own.kill()
    after = f" after {asked.by} to all processes of the run" if asked.by else ""
    return RayLostError(f"{what}{after}: the step under way is lost.")


def _own_exception(error: Any) -> Exception:
    """What the process raised, without Ray's wrapping; the text of the traceback there is at the end of its causes."""
    import ray

    text = str(error)
    while isinstance(error, ray.exceptions.RayTaskError):
        error = error.cause
    if not isinstance(error, Exception) or isinstance(error, ray.exceptions.RayError):
        # Its class does not unpickle here, or is Ray's. The last line of a traceback says what it was.
        cause, error = error, RuntimeError(text.strip().splitlines()[-1])
        error.__cause__ = cause if isinstance(cause, Exception) else None
    first: BaseException = error
    while first.__cause__ is not None:
        first = first.__cause__
    first.__cause__ = RemoteTraceback(text)
    return error
