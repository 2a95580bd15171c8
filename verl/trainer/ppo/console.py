"""What a run shows: progress bars on a terminal, plain lines in a file. Metrics go through Tracking."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

# What users know the phases as.
BAR_NAMES = {
    "gen": "rollout",
    "values": "compute_values",
    "update_actor": "train_actor",
    "update_critic": "train_critic",
}


class Console:
    """Progress of the steps, and of the phase that is running."""

    def __init__(self, total_steps: int, done_steps: int = 0) -> None:
        self._progress: Any = None
        if sys.stderr.isatty():
            from rich.console import Console as RichConsole
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=RichConsole(stderr=True), transient=True)
            self._progress.start()
            self._steps = self._progress.add_task("steps", total=total_steps, completed=done_steps)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show which phase runs."""
        task = None
        if self._progress is not None:
            task = self._progress.add_task(f"  {BAR_NAMES.get(name, name)}", total=None)
        try:
            yield
        finally:
            if task is not None:
                self._progress.remove_task(task)

    def step_done(self) -> None:
        """One more step is complete."""
        if self._progress is not None:
            self._progress.advance(self._steps)

    def close(self) -> None:
        """Take the bars off the screen."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
