"""Where a run stands: its step, the phase that is running and how far it is. The driver draws it, when it likes.

Nothing here runs by itself: `standing()` is called from the driver's side, and only then are the ranks asked for their
counts, beside their work. Training neither waits for that nor hears of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from verl.utils.exceptions import note
from verl.utils.progress import Progress, counted_by

logger = logging.getLogger(__name__)

# What users know the phases as.
BAR_NAMES = {
    "gen": "rollout",
    "values": "compute_values",
    "update_actor": "train_actor",
    "update_critic": "train_critic",
    "testing": "validation",
}


@dataclass(frozen=True)
class Standing:
    """A moment of a run: `step` of `total` steps are complete; in the phase that runs, `done` of `units` samples."""

    step: int
    total: int
    phase: str = ""
    phase_seconds: float = 0.0
    done: int = 0
    units: int = 0
    """0: this phase is not counted."""


@dataclass(frozen=True)
class _Phase:
    name: str
    groups: Sequence[Any] = ()
    progress: Progress = field(default_factory=Progress)
    start: float = field(default_factory=time.monotonic)


class Console:
    """Kept by the trainer, which runs in an actor without a terminal; whoever has one asks for `standing()`."""

    def __init__(self, total_steps: int, done_steps: int = 0) -> None:
        self._total, self._step = total_steps, done_steps
        self._phase = _Phase("")
        self._ask_ranks = True

    @contextmanager
    def phase(self, name: str, *groups: Any) -> Iterator[None]:
        """Say which phase runs, and which worker groups work in it; the phase around it is back afterwards.

        What the controller itself does in a phase may be counted too, by `verl.utils.progress`.
        """
        outer, self._phase = self._phase, _Phase(BAR_NAMES.get(name, name), groups)
        try:
            with counted_by(self._phase.progress):
                yield
        except Exception as error:
            # It tells of them in whatever process it ends.
            note(error, phase=name, step=self._step + 1)
            raise
        finally:
            self._phase = outer

    def step_done(self) -> None:
        """One more step is complete."""
        self._step += 1

    def standing(self) -> Standing:
        """Where the run stands now. May be called from any thread."""
        phase = self._phase
        counts = [phase.progress.read(), *self._counts_of_ranks(phase)]
        done, units = (sum(column) for column in zip(*counts, strict=True))
        return Standing(self._step, self._total, phase.name, time.monotonic() - phase.start, done, units)

    def _counts_of_ranks(self, phase: _Phase) -> list[tuple[int, int]]:
        """(done, total) of every rank that works in the phase."""
        if not self._ask_ranks:
            return []
        try:
            # A worker class of the user's own need not count.
            counting = [group for group in phase.groups if hasattr(group, "progress")]
            return [counts for group in counting for counts in group.progress()]
        except Exception as error:  # noqa: BLE001 - said, once; a count that is missing must not end a training run
            self._ask_ranks = False
            logger.warning("progress inside phases is not shown any more: %r", error)
            return []
