"""StepEnd: after a training step save and validate, when that is due and when the run is asked to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from verl.trainer.common.phases import Phases
from verl.trainer.common.setbacks import SAVE, VALIDATION, Setbacks


class StepEnd:
    """The same for every trainer. A save comes before a validation, so that one that fails costs no step."""

    def __init__(
        self,
        stop_requested: threading.Event,
        setbacks: Setbacks,
        save: Callable[[], Any],
        validate: Callable[[], dict[str, float]],
    ) -> None:
        self._stop_requested, self._setbacks = stop_requested, setbacks
        self._save, self._validate = save, validate

    def __call__(
        self, step: int, saves: bool, tests: bool, phases: Phases, *groups: Any
    ) -> tuple[dict[str, float], bool]:
        """`saves`, `tests`: it is due. Metrics of the validation and of what failed; whether the run stops now."""
        metrics: dict[str, float] = {}
        saved = saves or self._stop_requested.is_set()
        if saved:
            self._attempt_save(step, phases)
        if tests and not self._stop_requested.is_set():
            with phases("testing", *groups):
                metrics |= self._setbacks.attempt(VALIDATION, step, self._validate) or {}
        stopping = self._stop_requested.is_set()
        if stopping and not saved:
            self._attempt_save(step, phases)
        return metrics | self._setbacks.metrics(), stopping

    def _attempt_save(self, step: int, phases: Phases) -> None:
        with phases("save_checkpoint"):
            self._setbacks.attempt(SAVE, step, self._save)


def is_due(step: int, every: int, last: int) -> bool:
    """Every so many steps (never where that is not positive), and after the last."""
    return step >= last or (every > 0 and step % every == 0)
