"""Preemption: a signal leaves a run `trainer.save_within` seconds; what does not fit is given up, and the state after
the last complete step is saved."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from verl.trainer.common.phases import Phases

logger = logging.getLogger(__name__)

SIGNALS = ("SIGTERM", "SIGUSR1")
"""Those that a scheduler sends some time before it kills; Ctrl-C and SIGHUP leave all the time there is."""

# In these a step has changed nothing yet that cannot be taken back. A phase of the user's own may have.
_BEFORE_UPDATES = ("step", "update_weights", "gen", "reward", "old_log_prob", "ref", "teacher", "values", "adv")
_VALIDATION, _SAVE = "testing", "save_checkpoint"
_AGAIN_S = 0.2

Result = TypeVar("Result")


class GivenUpError(RuntimeError):
    """What runs ends here: there is no time for it."""


def rest_of(usual: Mapping[str, float], spent: Mapping[str, float], phase: str) -> float | None:
    """Seconds that the step, or its validation if that is the `phase`, still needs; None where that is not known.

    `usual`, `spent`: seconds by phase, of earlier steps and of this one. A phase that was quicker than usual counts as
    if it had not ended: generation may come in several rounds.
    """
    names = {_VALIDATION} if phase == _VALIDATION else usual.keys() - {"step", _VALIDATION, _SAVE}
    if not names or not names <= usual.keys():
        return None
    return sum(max(0.0, usual[name] - spent.get(name, 0.0)) for name in names)


def fits(within: float, rest: float | None, save: float | None) -> bool:
    """Whether there is time for `rest` and then a save. Half is kept for a save that was never timed."""
    return rest is not None and rest + (within / 2 if save is None else save) <= within


class Preemption:
    """What the trainer enters, and what a signal decides, in whichever order their threads come."""

    def __init__(self, within: float | None) -> None:
        self.within = within
        self.given_up: str | None = None
        """What was, and why."""
        self._usual: dict[str, float] = {}
        self._phases: Phases | None = None
        self._lock = threading.RLock()
        self._over = threading.Event()
        self.end_step(0)

    def begin_step(self, step: int, phases: Phases) -> None:
        """From here on `phases` are this one's."""
        with self._lock:
            self._step, self._phases = step, phases

    def end_step(self, step: int) -> None:
        """It is complete, and nothing of the next one is done."""
        with self._lock:
            if self._phases is not None:
                self._usual |= self._phases.seconds
            self._step, self._phases, self._phase, self._updates = step + 1, None, "step", False

    def enter(self, phase: str) -> None:
        """A phase begins; GivenUpError where there is no time for it any more."""
        with self._lock:
            if self.given_up is not None and phase != _SAVE:
                raise GivenUpError(self.given_up)
            self._phase = phase
            self._updates = self._updates or phase not in _BEFORE_UPDATES

    def decide(self, by: str, save: float | None) -> bool:
        """Give up what runs? `by` is the signal, `save` what the last save took. From any thread."""
        with self._lock:
            validates = self._phase == _VALIDATION
            if self.within is None or self.given_up is not None:
                return False
            if self._updates and not validates:
                logger.info("%s: the update of step %d has begun and is finished first", by, self._step)
                return False
            spent = {} if self._phases is None else self._phases.spent()
            rest = rest_of(self._usual, spent, self._phase)
            if fits(self.within, rest, save):
                return False
            seconds = spent.get(_VALIDATION if validates else "step", 0.0)
            more = "a time that is not known" if rest is None else f"about {rest:.0f} s more"
            self.given_up = (
                f"{by}: {'validation of ' if validates else ''}step {self._step} given up after {seconds:.0f} s"
                f" (it needs {more}, trainer.save_within={self.within:g})"
            )
            return True

    def keep_cancelling(self, cancel: Callable[[], object]) -> None:
        """From a thread, until what was given up has ended: a call may begin just after it was cancelled."""

        def run() -> None:
            while not self._over.wait(_AGAIN_S):
                try:
                    cancel()
                except Exception as error:  # noqa: BLE001 - said; the phase then ends by itself
                    logger.warning("the generation could not be cancelled: %r", error)
                    return

        threading.Thread(target=run, name="preemption", daemon=True).start()

    def ended(self) -> str | None:
        """What was given up is over: why it was, if anything was."""
        if self.given_up is not None:
            self._over.set()
        return self.given_up

    def unless_given_up(self, act: Callable[[], dict[str, Result]]) -> dict[str, Result]:
        """The result of `act`; an empty one where it was given up, which is said."""
        try:
            return act()
        except Exception:
            if self.ended() is None:
                raise
            logger.warning(self.given_up)
            return {}
