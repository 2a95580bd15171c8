"""Saving and validating after a step. A save, a validation or a dump that fails costs itself, not the run: it is said
and counted, and training goes on."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from verl.config import ConfigError
from verl.single_controller.base.errors import HangError, WorkerCallError, WorkerDiedError
from verl.trainer.common.checkpoint import Saver
from verl.trainer.common.guard import TrainingStoppedError
from verl.trainer.common.phases import Phases
from verl.trainer.common.preemption import Preemption
from verl.utils.exceptions import causes
from verl.workers.reward_manager.naive import RewardError

logger = logging.getLogger(__name__)

SAVE, VALIDATION, DUMP = "save", "validation", "dump"
FOLDER = "trainer.default_local_dir"

# What going on cannot help: processes that are gone or hang, a configuration that is wrong, weights that are lost, and
# a reward that is to end the run (`reward_model.on_error=fail`).
_ENDS_THE_RUN = (WorkerDiedError, HangError, ConfigError, TrainingStoppedError, FloatingPointError, RewardError)
# Calls whose failure leaves all ranks ready for the next: answers are generated apart, and all hear of a failed save.
# In any other call ranks work together, and those that did not fail may still wait for the one that did.
_APART = ("generate_sequences", "save_checkpoint", "begin_save", "finish_save")
_NEXT = {
    SAVE: "Training goes on and saves again at the next step that is due",
    VALIDATION: "Training goes on; this step has no validation metrics",
}

Result = TypeVar("Result")


class UnsavedRunError(RuntimeError):
    """The run is over and its last step could not be saved."""


class Setbacks:
    """Counts what failed, in `training/failed_saves`, `training/failed_validations` and `training/failed_dumps`."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._unsaved: str | None = None
        self._said: set[str] = set()

    def attempt(self, what: str, step: int, act: Callable[[], Result], essential: bool = False) -> Result | None:
        """The result of `act`; None where it failed in a way that the run survives. `essential`: it survives none."""
        try:
            result = act()
        except Exception as error:
            if essential or ends_the_run(error):
                raise
            self._counts[what] += 1
            reason = summary(error)
            if what == SAVE:
                self._unsaved = reason
            # The traceback first: the last line is the one that is read.
            logger.warning("%s of step %d failed:", what, step, exc_info=_unexpected(error))
            logger.error("%s of step %d failed: %s. %s.", what, step, reason, _NEXT[what])
            return None
        if what == SAVE:
            self._unsaved = None
        return result

    def dump(self, key: str, folder: str, step: int, act: Callable[[], Result]) -> Result | None:
        """The same of a file for people to look at, below `folder`, the value of `key`: said once per key, counted."""
        try:
            return act()
        except Exception as error:
            if ends_the_run(error):
                raise
            self._counts[DUMP] += 1
            if key not in self._said:
                self._said.add(key)
                logger.warning("%s: a file of step %d could not be written:", key, step, exc_info=_unexpected(error))
                logger.error(
                    "%s = %s: a file of step %d could not be written: %s. Training goes on without it; others that fail"
                    " are only counted (training/failed_dumps).",
                    *(key, folder, step, summary(error)),
                )
            return None

    def metrics(self) -> dict[str, float]:
        """How many failed so far, of what has failed at all."""
        return {f"training/failed_{what}s": float(count) for what, count in self._counts.items()}

    def refuse_an_unsaved_end(self, step: int) -> None:
        """Raise where the newest save failed: there is no next one, and what was learnt since the last is lost."""
        if self._unsaved is not None:
            raise UnsavedRunError(f"the run ends at step {step}, which could not be saved: {self._unsaved}")


class StepEnd:
    """After a training step: save and validate where that is due, save when the run is asked to stop.

    A save is begun before a validation, so that one that fails costs no step, and written behind it and the next step.
    Of one that failed there the next step's end tells. The last one of a run is waited for and read back.
    """

    def __init__(
        self,
        stop_requested: threading.Event,
        setbacks: Setbacks,
        saver: Saver,
        preemption: Preemption,
    ) -> None:
        self._stop_requested, self._setbacks, self._saver = stop_requested, setbacks, saver
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

        `save` begins a save of the saver; `groups` are the worker groups that run during `validate`.
        """
        metrics = self._saved()
        saved = save_due or self._stop_requested.is_set()
        if saved:
            metrics |= self._attempt_save(step, save, phases)
        if test_due and not self._stop_requested.is_set():
            with phases("testing", *groups):
                attempt = partial(self._preemption.unless_given_up, validate)
                metrics |= self._setbacks.attempt(VALIDATION, step, attempt) or {}
        stopping = self._stop_requested.is_set()
        if stopping and not saved:
            metrics |= self._attempt_save(step, save, phases)
        if stopping or is_last:
            with phases("save_checkpoint"):
                metrics |= self._saved(last=True)
        return metrics | self._saver.metrics() | self._setbacks.metrics(), stopping

    def go_back(self, step: int, save: Callable[[], Any], phases: Phases) -> None:
        """After the next step was given up: save `step` unless it is already saved."""
        if step and self._saver.newest_step != step:
            self._attempt_save(step, save, phases)
        with phases("save_checkpoint"):
            self._saved(last=True)
        self._setbacks.refuse_an_unsaved_end(step)
        place = f"is saved in {self._saver.root}" if step else "is where the same command starts: none was complete"
        logger.warning("%s; step %d %s", self._preemption.given_up, step, place)

    def _attempt_save(self, step: int, save: Callable[[], Any], phases: Phases) -> dict[str, float]:
        with phases("save_checkpoint"):
            self._saver.wait_for_turn(step)
            metrics = self._saved()
            self._setbacks.attempt(SAVE, step, save)
        return metrics

    def _saved(self, last: bool = False) -> dict[str, float]:
        """Metrics of the saves that have ended since. `last`: the run ends with what is on disk then, and reads it back
        if there is time."""
        metrics: dict[str, float] = {}
        verify = last and (self._preemption.within is None or not self._stop_requested.is_set())
        for save in self._saver.collect(wait=last):
            metrics |= self._setbacks.attempt(SAVE, save.step, partial(save.result, verify=verify)) or {}
        return metrics


def is_due(step: int, every: int, last: int) -> bool:
    """Every so many steps (never where that is not positive), and after the last."""
    return step >= last or (every > 0 and step % every == 0)


def ends_the_run(error: BaseException) -> bool:
    """Whether the error, or one that caused it, leaves nothing to go on with."""
    found = causes(error)
    return any(
        isinstance(each, _ENDS_THE_RUN) or (isinstance(each, WorkerCallError) and each.method not in _APART)
        for each in found
    )


def summary(error: BaseException) -> str:
    """One line: what kind of error, and the first line of what it says."""
    first_line = str(error).strip().splitlines()[:1]
    return f"{type(error).__name__}: {first_line[0].rstrip('.')}" if first_line else type(error).__name__


def _unexpected(error: BaseException) -> BaseException | None:
    """The error where its traceback tells more than its message: of a full disk it does not."""
    return error if not isinstance(error, OSError) else None
