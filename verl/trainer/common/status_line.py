"""Where a run stands: its step, its phase and how far that is; bars on a terminal, now and then a line elsewhere.

The trainer keeps a `StatusLine`; the driver asks it for `standing()` every second, and only then are ranks asked for
their counts, beside their work. Training neither waits for that nor hears of it.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TextIO

from verl.utils.exceptions import annotate_error
from verl.utils.progress import Progress, record_progress

logger = logging.getLogger(__name__)

_REDRAW_S = 0.5
_LOOK_S = 5.0
_ANSWER_S = 1.0
_LINE_S = 30.0

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
    trouble: str | None = None
    """What the run waits for, where something is wrong."""
    hang: Exception | None = None
    """What ends the run: nothing moves any more."""
    pid: int = 0
    host: str = ""
    """Of the controller."""
    activity: str | None = None
    """The long operation of the ranks outside of phases, such as the start of their engines."""
    starting: bool = False
    """The run has not reached its first step: a stop signal has nothing to finish or save."""

    @property
    def label(self) -> str:
        """The phase, or the activity outside of phases."""
        return self.phase or self.activity or ""


@dataclass(frozen=True, eq=False)
class Phase:
    """A phase that runs."""

    key: str
    """Its name in metrics."""
    groups: Sequence[Any] = ()
    progress: Progress = field(default_factory=Progress)
    start: float = field(default_factory=time.monotonic)


class StatusLine:
    """Kept by the trainer, which may run in an actor without a terminal."""

    def __init__(self, total_steps: int, done_steps: int = 0) -> None:
        self.total, self.step = total_steps, done_steps
        self.now = Phase("")
        self.trouble: str | None = None
        self.hang: Exception | None = None
        self.activity: str | None = None
        self.starting = False
        self.on_phase_end: Callable[[str, float], None] = lambda name, seconds: None
        self._ask_ranks = True

    @contextmanager
    def phase(self, name: str, *groups: Any) -> Iterator[None]:
        """Say which phase runs, and which worker groups work in it; the phase around it is back afterwards.

        What the controller itself does in a phase may be counted too, by `verl.utils.progress`.
        """
        outer, self.now = self.now, Phase(name, groups)
        try:
            with record_progress(self.now.progress):
                yield
            self.on_phase_end(name, time.monotonic() - self.now.start)
        except Exception as error:
            # It tells of them in whatever process it ends.
            annotate_error(error, phase=name, step=self.step + 1)
            raise
        finally:
            self.now = outer

    def step_done(self) -> None:
        """One more step is complete."""
        self.step += 1

    def standing(self) -> Standing:
        """Where the run stands now. May be called from any thread."""
        phase = self.now
        counts = [phase.progress.read(), *self._counts_of_ranks(phase)]
        done, units = (sum(column) for column in zip(*counts, strict=True))
        name, seconds = BAR_NAMES.get(phase.key, phase.key), time.monotonic() - phase.start
        process = os.getpid(), socket.gethostname()
        return Standing(
            self.step,
            self.total,
            name,
            seconds,
            done,
            units,
            self.trouble,
            self.hang,
            *process,
            self.activity,
            self.starting,
        )

    def _counts_of_ranks(self, phase: Phase) -> list[tuple[int, int]]:
        """(done, total) of every rank that works in the phase."""
        if not self._ask_ranks:
            return []
        try:
            # A worker class of the user's own need not count.
            counting = [group for group in phase.groups if hasattr(group, "progress")]
            answers = [counts for group in counting for counts in group.ask("progress", _ANSWER_S)]
            return [counts for counts in answers if counts is not None]
        except Exception as error:  # noqa: BLE001 - said, once; a count that is missing must not end a training run
            self._ask_ranks = False
            logger.warning("progress inside phases is not shown any more: %r", error)
            return []


@contextmanager
def progress_bar(standing: Callable[[], Standing | None]) -> Iterator[None]:
    """Show what `standing()` says for as long as the block runs; from a thread, so that the block never waits."""
    drawn = sys.stderr.isatty()
    done = threading.Event()
    with _bars() if drawn else nullcontext(Lines()) as show:

        def keep_showing() -> None:
            try:
                while not done.wait(_REDRAW_S if drawn else _LOOK_S):
                    now = standing()
                    if now is not None and now.total:
                        show(now)
            except Exception as error:  # noqa: BLE001 - said; the run goes on without its bar
                if not done.is_set():
                    logger.warning("progress is not shown any more: %r", error)

        shower = threading.Thread(target=keep_showing, name="progress", daemon=True)
        shower.start()
        try:
            yield
        finally:
            done.set()
            shower.join(timeout=5)


class Lines:
    """A line in the log for every 30 s that one phase runs; short phases say nothing."""

    def __init__(self) -> None:
        self._last: Standing | None = None
        self._said_at = 0.0

    def __call__(self, now: Standing) -> None:
        if _another_phase(self._last, now):
            self._said_at = 0.0
        self._last = now
        if now.phase and now.phase_seconds - self._said_at >= _LINE_S:
            self._said_at = now.phase_seconds
            count = f" {now.done}/{now.units}" if now.units else ""
            logger.info("step %d/%d: %s%s, %.0f s", now.step + 1, now.total, now.phase, count, now.phase_seconds)


# What rich puts in the place of sys.stdout and sys.stderr. `print` only borrows it while it writes: freed by a thread
# that closes the bars, it would take the run with it.
_shown_through: list[TextIO] = []


@contextmanager
def _bars() -> Iterator[Bars]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:<18}"),
        BarColumn(),
        TextColumn("{task.fields[count]:>11}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as rows:
        _shown_through.extend((sys.stdout, sys.stderr))
        yield Bars(rows)


class Bars:
    """Two rows of a rich `Progress`: the steps, and the samples of the phase that runs."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows
        self._steps = rows.add_task("steps", total=None, count="")
        self._phase = rows.add_task("starting", total=None, count="")
        self._last: Standing | None = None

    def __call__(self, now: Standing) -> None:
        if not self._rows.console.is_terminal:  # it closed: what is drawn now would fill a file
            self._rows.stop()
        self._rows.update(self._steps, completed=now.step, total=now.total, count=f"{now.step}/{now.total}")
        if _another_phase(self._last, now):
            # A new row, for its clock and its estimate start again.
            self._rows.remove_task(self._phase)
            self._phase = self._rows.add_task(now.label, total=None, count="", visible=bool(now.label))
        if now.units:  # the last count stays when the ranks are done and the phase is not
            self._rows.update(self._phase, completed=now.done, total=now.units, count=f"{now.done}/{now.units}")
        self._last = now


def _another_phase(before: Standing | None, now: Standing) -> bool:
    if before is None or (before.step, before.label) != (now.step, now.label):
        return True
    return now.phase_seconds < before.phase_seconds  # the same name again: a step may generate several times
