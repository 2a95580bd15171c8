"""Errors of group calls, with role, rank, host and method; `Failure` carries a worker's exception to the controller."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from typing import Any

from verl.utils.exceptions import PicklableError


class CallCancelled(RuntimeError):
    """Raised inside a compute call by `Worker.check_cancelled()` after the group's `cancel()`."""


class WorkerError(PicklableError, RuntimeError):
    """A call on a worker group failed. `summary`: the cause; `role`, `rank`, `host`, `method`: the failed call."""

    phase: str | None = None
    """Phase of the training step (`verl.trainer.common.run_status`), if a trainer made the call."""
    step: int | None = None

    def __init__(self, summary: str, role: str, rank: int, host: str, method: str, detail: str = "") -> None:
        self.summary = summary
        self.role, self.rank, self.host, self.method = role, rank, host, method
        where = f"role {role!r}, rank {rank}, host {host}, method {method!r}"
        super().__init__(f"{summary} ({where})" + (f"\n{detail}" if detail else ""))


class WorkerCallError(WorkerError):
    """The worker's method raised. `worker_traceback`: its traceback; `__cause__`: its exception, if picklable."""

    def __init__(self, failure: Failure, role: str, rank: int, host: str, method: str, others: int = 0) -> None:
        self.failure = failure
        self.worker_traceback = failure.traceback
        summary = f"worker raised {failure.summary}" + (f"; {others} other rank(s) failed too" if others else "")
        super().__init__(summary, role, rank, host, method, f"worker traceback:\n{failure.traceback}")
        self.__cause__ = failure.exception()

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.__cause__ = self.failure.exception()  # pickle does not keep causes


class WorkerDiedError(WorkerError):
    """The worker's process died. Its group raises this on every call until it is restarted."""

    advice: str = ""
    """The remedy in the message if host memory is the likely cause, else empty."""

    def replace_advice(self, advice: str) -> None:
        """Replace the general advice in the message by this one."""
        self.summary = self.summary.replace(self.advice, advice)
        self.args = (self.args[0].replace(self.advice, advice),)
        self.advice = advice


class HangError(WorkerError):
    """No progress for `trainer.hang_timeout`. `summary`: which rank waits for which; the detail: the last heartbeat and
    stack of every rank. A restarted run may succeed."""

    exit_immediately: bool = False
    """Ray itself hangs: the program exits without waiting for it."""


@dataclass(frozen=True)
class Failure:
    """An exception of a worker, in a form that is always picklable."""

    summary: str
    traceback: str
    pickled: bytes | None

    @classmethod
    def from_exception(cls, error: BaseException) -> Failure:
        """Capture `error`, including the object itself if it is picklable."""
        try:
            pickled = pickle.dumps(error)
        except (pickle.PicklingError, TypeError, AttributeError):
            pickled = None
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(f"{type(error).__name__}: {error}", text, pickled)

    def exception(self) -> BaseException | None:
        """The original exception; None: it was not picklable."""
        if self.pickled is None:
            return None
        try:
            # Bytes from our own worker over Ray, which unpickles all messages anyway.
            loaded = pickle.loads(self.pickled)
        except Exception as error:  # noqa: BLE001 - unpickling may raise anything; report it
            return RuntimeError(f"{self.summary} (the exception itself does not unpickle here: {error})")
        return loaded if isinstance(loaded, BaseException) else None


def result_or_raise(output: Any) -> Any:
    """The output of a rank's method; if it is a `Failure`, raise its exception."""
    if isinstance(output, Failure):
        raise output.exception() or RuntimeError(f"{output.summary}\n{output.traceback}")
    return output
