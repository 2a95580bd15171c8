"""StepEnd: save and validate after a step.

NonFatalFailures: a failed save, validation or dump does not end the run; it is logged and counted.

Preemption: after a signal, a run has `trainer.save_within` seconds left. A step or validation that would take longer is
given up, and the state after the last complete step is saved.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from verl.config import ConfigError
from verl.single_controller.base.worker_group import HangError, WorkerCallError, WorkerDiedError
from verl.trainer.common.checkpoint import Saver
from verl.trainer.common.run_status import Phases
from verl.trainer.common.training_health import TrainingStoppedError
from verl.utils.exceptions import cause_chain
from verl.workers.reward_manager.naive import RewardError

logger = logging.getLogger(__name__)

SAVE, VALIDATION, DUMP = "save", "validation", "dump"
FOLDER = "trainer.default_local_dir"

# Always fatal: dead or hanging processes, an invalid configuration, non-finite weights, and an error of a reward with
# `reward_model.on_error=fail`.
_FATAL = (WorkerDiedError, HangError, ConfigError, TrainingStoppedError, FloatingPointError, RewardError)
# Worker calls after whose failure all ranks can take the next call: ranks generate independently, and a failed save
# fails on all ranks. After other calls, some ranks may still wait in a collective for the rank that failed.
_NON_FATAL_CALLS = (
    *("generate_sequences", "raise_engine_error", "end_generation"),
    *("save_checkpoint", "begin_save", "finish_save"),
)
_NEXT = {
    SAVE: "Training continues and saves again at the next step that is due",
    VALIDATION: "Training continues; this step has no validation metrics",
}

# Phases that change no state of the run, so that a step can be given up in them. Phases of users may change it.
_BEFORE_UPDATES = ("step", "update_weights", "gen", "reward", "old_log_prob", "ref", "teacher", "values", "adv")
_VALIDATION_PHASE, _SAVE_PHASE = "testing", "save_checkpoint"
_CANCEL_INTERVAL_S = 0.2

Result = TypeVar("Result")


# ---------------------------------------------------------------- non-fatal failures


class UnsavedRunError(RuntimeError):
    """The run has ended and its last step could not be saved."""


class NonFatalFailures:
    """Counts failures in `training/failed_saves`, `training/failed_validations` and `training/failed_dumps`."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._unsaved: str | None = None
        self._reported_keys: set[str] = set()

    def attempt(self, kind: str, step: int, call: Callable[[], Result], essential: bool = False) -> Result | None:
        """Return `call()`; None after a non-fatal failure. `kind`: SAVE or VALIDATION. `essential`: raise every
        failure."""
        try:
            result = call()
        except Exception as error:
            if essential or is_fatal(error):
                raise
            self._counts[kind] += 1
            reason = summary(error)
            if kind == SAVE:
                self._unsaved = reason
            # The traceback first: users read the last line.
            logger.warning("%s of step %d failed:", kind, step, exc_info=_unexpected(error))
            logger.error("%s of step %d failed: %s. %s.", kind, step, reason, _NEXT[kind])
            return None
        if kind == SAVE:
            self._unsaved = None
        return result

    def dump(self, key: str, folder: str, step: int, call: Callable[[], Result]) -> Result | None:
        """Like `attempt`, for writing a file into `folder`, the value of the configuration key `key`. Failures are
        logged once per key."""
        try:
            return call()
        except Exception as error:
            if is_fatal(error):
                raise
            self._counts[DUMP] += 1
            if key not in self._reported_keys:
                self._reported_keys.add(key)
                logger.warning("%s: a file of step %d could not be written:", key, step, exc_info=_unexpected(error))
                logger.error(
                    "%s = %s: a file of step %d could not be written: %s. Training continues without it; further"
                    " failures are only counted (training/failed_dumps).",
                    *(key, folder, step, summary(error)),
                )
            return None

    def metrics(self) -> dict[str, float]:
        """Return the number of failures so far, by kind."""
        return {f"training/failed_{kind}s": float(count) for kind, count in self._counts.items()}

    def raise_if_unsaved(self, step: int) -> None:
        """Raise UnsavedRunError if the newest save failed: the run ends, and training since the last save is lost."""
        if self._unsaved is not None:
            raise UnsavedRunError(f"the run ends at step {step}, which could not be saved: {self._unsaved}")


def is_fatal(error: BaseException) -> bool:
    """Return whether the run cannot continue after this error, judging by the error and its causes."""
    return any(
        isinstance(cause, _FATAL) or (isinstance(cause, WorkerCallError) and cause.method not in _NON_FATAL_CALLS)
        for cause in cause_chain(error)
    )


def summary(error: BaseException) -> str:
    """Return the type of the error and the first line of its message."""
    first_line = str(error).strip().splitlines()[:1]
    return f"{type(error).__name__}: {first_line[0].rstrip('.')}" if first_line else type(error).__name__


def _unexpected(error: BaseException) -> BaseException | None:
    """Return the error if its traceback is useful in the log; None for an OSError, such as a full disk."""
    return error if not isinstance(error, OSError) else None


# ---------------------------------------------------------------- after a step


class StepEnd:
    """After a training step: save and validate if due, and save if a stop was requested.

    A save begins before the validation, so that a failing validation loses no step. It is written in the background,
    during the validation and the next step; a failure of the write is reported at the end of the next step. The last
    save of a run is awaited and verified.
    """

    def __init__(
        self,
        stop_requested: threading.Event,
        failures: NonFatalFailures,
        saver: Saver,
        preemption: Preemption,
    ) -> None:
        self._stop_requested, self._failures, self._saver = stop_requested, failures, saver
        self._preemption = preemption

    def __call__(
        self,
        step: int,
        save: Callable[[], Any],
        validate: Callable[[], dict[str, float]],
        phases: Phases,
        *groups: Any,
        save_due: bool,
        test_due: bool,
        is_last: bool,
    ) -> tuple[dict[str, float], bool]:
        """Return the metrics of saves, validation and non-fatal failures, and whether the run stops now.

        `save` begins a save. `groups`: worker groups that work during `validate`.
        """
        metrics = self._collect_saves()
        saved = save_due or self._stop_requested.is_set()
        if saved:
            metrics |= self._attempt_save(step, save, phases)
        if test_due and not self._stop_requested.is_set():
            with phases("testing", *groups):
                attempt = partial(self._preemption.unless_given_up, validate)
                metrics |= self._failures.attempt(VALIDATION, step, attempt) or {}
        stopping = self._stop_requested.is_set()
        if stopping and not saved:
            metrics |= self._attempt_save(step, save, phases)
        if stopping or is_last:
            with phases("save_checkpoint"):
                metrics |= self._collect_saves(last=True)
        return metrics | self._saver.metrics() | self._failures.metrics(), stopping

    def finish_preempted(self, step: int, save: Callable[[], Any], phases: Phases) -> None:
        """After a preemption signal, when the step after `step` was given up: save `step`, unless it is saved."""
        if step and self._saver.newest_step != step:
            self._attempt_save(step, save, phases)
        with phases("save_checkpoint"):
            self._collect_saves(last=True)
        self._failures.raise_if_unsaved(step)
        outcome = f"step {step} is saved in {self._saver.root}" if step else "no step was complete, so nothing is saved"
        logger.warning("%s; %s", self._preemption.given_up, outcome)

    def _attempt_save(self, step: int, save: Callable[[], Any], phases: Phases) -> dict[str, float]:
        with phases("save_checkpoint"):
            self._saver.wait_for_turn(step)
            metrics = self._collect_saves()
            self._failures.attempt(SAVE, step, save)
        return metrics

    def _collect_saves(self, last: bool = False) -> dict[str, float]:
        """Return the metrics of saves that have ended since the last call. With `last`, wait for all saves and verify
        them, if there is time."""
        metrics: dict[str, float] = {}
        verify = last and (self._preemption.within is None or not self._stop_requested.is_set())
        for save in self._saver.collect(wait=last):
            metrics |= self._failures.attempt(SAVE, save.step, partial(save.metrics, verify=verify)) or {}
        return metrics


def is_due(step: int, every: int, last: int) -> bool:
    """Return whether `step` is the last step, or a multiple of `every`, if that is positive."""
    return step >= last or (every > 0 and step % every == 0)


# ---------------------------------------------------------------- preemption


class GivenUpError(RuntimeError):
    """Raised at the beginning of a phase for which there is no time left."""


def remaining_seconds(usual: Mapping[str, float], elapsed: Mapping[str, float], phase: str) -> float | None:
    """Return the seconds that the step (in phase `testing`: its validation) still needs; None if unknown.

    `usual`, `elapsed`: seconds per phase, of earlier steps and of this step. A phase that took less than usual is
    assumed to continue: generation may have several rounds.
    """
    names = (
        {_VALIDATION_PHASE} if phase == _VALIDATION_PHASE else usual.keys() - {"step", _VALIDATION_PHASE, _SAVE_PHASE}
    )
    if not names or not names <= usual.keys():
        return None
    return sum(max(0.0, usual[name] - elapsed.get(name, 0.0)) for name in names)


def fits(within: float, remaining: float | None, save: float | None) -> bool:
    """Return whether `remaining` and `save` (seconds) fit into `within`. A save of unknown duration is assumed to take
    half of `within`."""
    return remaining is not None and remaining + (within / 2 if save is None else save) <= within


class Preemption:
    """Decides at a signal whether there is time to finish the step. The trainer reports its phases. Thread-safe."""

    def __init__(self, within: float | None) -> None:
        self.within = within
        self.given_up: str | None = None
        """Message with the step or validation that was given up, and the reason; None: nothing was given up."""
        self._usual: dict[str, float] = {}
        self._phases: Phases | None = None
        self._lock = threading.RLock()
        self._done = threading.Event()
        self.end_step(0)

    def begin_step(self, step: int, phases: Phases) -> None:
        """Record the beginning of a step, whose times are in `phases`."""
        with self._lock:
            self._step, self._phases = step, phases

    def end_step(self, step: int) -> None:
        """Record the end of a step; the next one has not begun."""
        with self._lock:
            if self._phases is not None:
                self._usual |= self._phases.seconds
            self._step, self._phases, self._phase, self._has_updated = step + 1, None, "step", False

    def enter_phase(self, phase: str) -> None:
        """Record the beginning of a phase. Raises GivenUpError if the step was given up, except for a save."""
        with self._lock:
            if self.given_up is not None and phase != _SAVE_PHASE:
                raise GivenUpError(self.given_up)
            self._phase = phase
            self._has_updated = self._has_updated or phase not in _BEFORE_UPDATES

    def decide(self, signal: str, save: float | None) -> bool:
        """Return whether to give up the current step or validation. `save`: seconds of the last save."""
        with self._lock:
            is_validating = self._phase == _VALIDATION_PHASE
            if self.within is None or self.given_up is not None:
                return False
            if self._has_updated and not is_validating:
                logger.info("%s: the update of step %d has begun and is finished first", signal, self._step)
                return False
            elapsed = {} if self._phases is None else self._phases.elapsed()
            remaining = remaining_seconds(self._usual, elapsed, self._phase)
            if fits(self.within, remaining, save):
                return False
            seconds = elapsed.get(_VALIDATION_PHASE if is_validating else "step", 0.0)
            more = "an unknown time" if remaining is None else f"about {remaining:.0f} s more"
            self.given_up = (
                f"{signal}: {'validation of ' if is_validating else ''}step {self._step} given up after {seconds:.0f} s"
                f" (it needs {more}, trainer.save_within={self.within:g})"
            )
            return True

    def keep_cancelling(self, cancel: Callable[[], object]) -> None:
        """Call `cancel` repeatedly, in a thread, until the phase has ended: further worker calls may begin in it."""

        def run() -> None:
            while not self._done.wait(_CANCEL_INTERVAL_S):
                try:
                    cancel()
                except Exception as error:  # noqa: BLE001 - logged; the phase then runs to its end
                    logger.warning("the generation could not be cancelled: %r", error)
                    return

        threading.Thread(target=run, name="preemption", daemon=True).start()

    def finish(self) -> str | None:
        """Stop cancelling, because the phase that was given up has ended. Returns `given_up`."""
        if self.given_up is not None:
            self._done.set()
        return self.given_up

    def unless_given_up(self, act: Callable[[], dict[str, Result]]) -> dict[str, Result]:
        """Return `act()`; if it fails because it was given up, log a warning and return {}."""
        try:
            return act()
        except Exception:
            if self.finish() is None:
                raise
            logger.warning(self.given_up)
            return {}
