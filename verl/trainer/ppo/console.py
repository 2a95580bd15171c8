"""Where a run stands: its step and the phase that is running. The driver draws it; metrics go through Tracking."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

# What users know the phases as.
BAR_NAMES = {
    "gen": "rollout",
    "values": "compute_values",
    "update_actor": "train_actor",
    "update_critic": "train_critic",
}


@dataclass(frozen=True)
class Standing:
    """A moment of a run."""

    step: int
    total: int
    phase: str = ""
    phase_seconds: float = 0.0


class Console:
    """Kept by the trainer, which runs in an actor without a terminal; whoever has one asks for `standing()`."""

    def __init__(self, total_steps: int, done_steps: int = 0) -> None:
        self._standing = Standing(done_steps, total_steps)
        self._phase_start = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say which phase runs; the one around it is back afterwards."""
        outer, outer_start = self._standing.phase, self._phase_start
        self._standing, self._phase_start = replace(self._standing, phase=BAR_NAMES.get(name, name)), time.monotonic()
        try:
            yield
        finally:
            self._standing, self._phase_start = replace(self._standing, phase=outer), outer_start

    def step_done(self) -> None:
        """One more step is complete."""
        self._standing = replace(self._standing, step=self._standing.step + 1)

    def standing(self) -> Standing:
        """Where the run stands now."""
        return replace(self._standing, phase_seconds=time.monotonic() - self._phase_start)
