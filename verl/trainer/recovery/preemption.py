"""Preemption: after a signal, a run has `trainer.save_within` seconds left. A step or validation that would take longer
is given up, and the state after the last complete step is saved."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from verl.trainer.common.run_status import Phases

logger = logging.getLogger(__name__)

PREEMPTION_SIGNALS = ("SIGTERM", "SIGUSR1")
"""A scheduler sends them some time before it kills the run; Ctrl-C and SIGHUP set no time limit."""

# Phases that change no state of the run, so that a step can be given up in them. Phases of users may change it.
_BEFORE_UPDATES = ("step", "update_weights", "gen", "reward", "old_log_prob", "ref", "teacher", "values", "adv")
_VALIDATION, _SAVE = "testing", "save_checkpoint"
_CANCEL_INTERVAL_S = 0.2

Result = TypeVar("Result")


class GivenUpError(RuntimeError):
    """Raised at the beginning of a phase for which there is no time left."""


def remaining_seconds(usual: Mapping[str, float], elapsed: Mapping[str, float], phase: str) -> float | None:
    """Return the seconds that the step (in phase `testing`: its validation) still needs; None if unknown.

    `usual`, `elapsed`: seconds per phase, of earlier steps and of this step. A phase that took less than usual is
    assumed to continue: generation may have several rounds.
    """
    names = {_VALIDATION} if phase == _VALIDATION else usual.keys() - {"step", _VALIDATION, _SAVE}
    if not names or not names <= usual.keys():
        return None
    return sum(max(0.0, usual[name] - elapsed.get(name, 0.0)) for name in names)


def fits(within: float, remaining: float | None, save: float | None) -> bool:
    """Return whether `remaining` and `save` (seconds) fit into `within`. A save of unknown duration gets half of it."""
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
            if self.given_up is not None and phase != _SAVE:
                raise GivenUpError(self.given_up)
            self._phase = phase
            self._has_updated = self._has_updated or phase not in _BEFORE_UPDATES

    def decide(self, signal: str, save: float | None) -> bool:
        """Return whether to give up the current step or validation. `save`: seconds of the last save."""
        with self._lock:
            is_validating = self._phase == _VALIDATION
            if self.within is None or self.given_up is not None:
                return False
            if self._has_updated and not is_validating:
                logger.info("%s: the update of step %d has begun and is finished first", signal, self._step)
                return False
            elapsed = {} if self._phases is None else self._phases.elapsed()
            remaining = remaining_seconds(self._usual, elapsed, self._phase)
            if fits(self.within, remaining, save):
                return False
            seconds = elapsed.get(_VALIDATION if is_validating else "step", 0.0)
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
