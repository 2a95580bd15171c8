"""What goes wrong in a worker, as the controller sees it: always with role, rank, host and method."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from typing import Any

from verl.utils.exceptions import PicklableError


class CallCancelled(RuntimeError):
    """Raised inside a compute call by `Worker.check_cancelled()` after the group's `cancel()`."""


class WorkerError(PicklableError, RuntimeError):
    """A call on a worker group failed. `summary` says what happened; `role`, `rank`, `host` and `method` say where."""

    phase: str | None = None
    """Of the training step, where a trainer made the call (see `verl.trainer.common.run_status`)."""
    step: int | None = None

    def __init__(self, summary: str, role: str, rank: int, host: str, method: str, detail: str = "") -> None:
        self.summary = summary
        self.role, self.rank, self.host, self.method = role, rank, host, method
        where = f"role {role!r}, rank {rank}, host {host}, method {method!r}"
        super().__init__(f"{summary} ({where})" + (f"\n{detail}" if detail else ""))


class WorkerCallError(WorkerError):
    """The worker's method raised; `worker_traceback` is its traceback, `__cause__` its exception where that pickles."""

    def __init__(self, failure: Failure, role: str, rank: int, host: str, method: str, others: int = 0) -> None:
        self.failure = failure
        self.worker_traceback = failure.traceback
        summary = f"worker raised {failure.summary}" + (f"; {others} other rank(s) failed too" if others else "")
        super().__init__(summary, role, rank, host, method, f"worker traceback:\n{failure.traceback}")
        self.__cause__ = failure.exception()

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.__cause__ = self.failure.exception()  # pickle leaves causes behind


class WorkerDiedError(WorkerError):
    """The worker's process is gone; its group can no longer be used."""

    advice: str = ""
    """Part of what it says: what helps, where the machine's memory is the likely cause."""

    def advise(self, advice: str) -> None:
        """Say this in the place of the general advice."""
        self.summary = self.summary.replace(self.advice, advice)
        self.args = (self.args[0].replace(self.advice, advice),)
        self.advice = advice


class HangError(WorkerError):
    """Nothing moves any more, within `trainer.hang_timeout`: `summary` says who waits for whom, the detail holds what
    every rank did last, with its stack. A run that is started again may get past it."""

    exit_immediately: bool = False
    """Ray itself hangs: the program exits without waiting for it."""


@dataclass(frozen=True)
class Failure:
    """An exception on its way from a worker to the controller."""

    summary: str
    traceback: str
    pickled: bytes | None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Capture `error`, keeping the object itself where it pickles."""
        try:
            pickled = pickle.dumps(error)
        except (pickle.PicklingError, TypeError, AttributeError):
            pickled = None
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(f"{type(error).__name__}: {error}", text, pickled)

    def exception(self) -> BaseException | None:
        """The original exception, or None where its class does not travel."""
        if self.pickled is None:
            return None
        try:
            # Our own worker's bytes, received over Ray, which pickles everything anyway.
            loaded = pickle.loads(self.pickled)
        except Exception as error:  # noqa: BLE001 - a class may unpickle in any wrong way; say so instead
            return RuntimeError(f"{self.summary} (the exception itself does not unpickle here: {error})")
        return loaded if isinstance(loaded, BaseException) else None
