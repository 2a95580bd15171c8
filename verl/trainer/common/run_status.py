"""Status of a run: its step, its phase, time and memory per phase.

The trainer updates a `RunStatus`. The driver regularly requests a `snapshot()` and shows it (`status_display`). A
snapshot polls the ranks for their progress while they work: training never waits for it.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from verl.utils.console import PHASE_NAMES, current_startup_phase
from verl.utils.exceptions import annotate_error
from verl.utils.progress import Progress, Span, record_progress

logger = logging.getLogger(__name__)

_PROGRESS_TIMEOUT_S = 1.0
_MEMORY_TIMEOUT_S = 10.0
_MAX_SPANS = 2000


@dataclass(frozen=True)
class StatusSnapshot:
    """`step` of `total` steps are complete; `done` of `units` samples of the current phase."""

    step: int
    total: int
    phase: str = ""
    phase_seconds: float = 0.0
    done: int = 0
    units: int = 0
    """0: this phase is not counted."""
    problem: str | None = None
    """Why the run makes no progress; None: no problem."""
    hang: Exception | None = None
    """The error that ends the run, because it hangs."""
    pid: int = 0
    host: str = ""
    """Process and host of the controller."""
    activity: str | None = None
    """A long operation of the ranks outside of phases, such as starting their engines."""
    starting: bool = False
    """Whether the first step has not begun, so that a stop signal need not finish or save a step."""
    startup: str = ""
    """The current start-up phase of the controller's process; empty: none."""
    startup_seconds: float = 0.0

    @property
    def label(self) -> str:
        """The phase; outside of phases the activity."""
        return self.phase or self.activity or ""


@dataclass(frozen=True, eq=False)
class Phase:
    """A phase that is running."""

    key: str
    """Its name in metrics."""
    groups: Sequence[Any] = ()
    progress: Progress = field(default_factory=Progress)
    start: float = field(default_factory=time.monotonic)


class RunStatus:
    """The current status, updated by the trainer, which may run in an actor without a terminal."""

    def __init__(self, total_steps: int, done_steps: int = 0) -> None:
        self.total, self.step = total_steps, done_steps
        self.current_phase = Phase("")
        self.problem: str | None = None
        self.hang: Exception | None = None
        self.activity: str | None = None
        self.starting = False
        self.on_phase_end: Callable[[str, float], None] = lambda name, seconds: None
        self.spans: deque[Span] = deque(maxlen=_MAX_SPANS)
        """Phases that have ended, for the recording of the run."""
        self._counts_ranks = True

    @contextmanager
    def phase(self, name: str, *groups: Any) -> Iterator[None]:
        """Enter a phase in which these worker groups work; afterwards the enclosing phase is current again.

        Progress of the controller's own work is counted by `verl.utils.progress`. Errors that leave the phase get the
        attributes `phase` and `step`.
        """
        outer, self.current_phase = self.current_phase, Phase(name, groups)
        start = time.time()
        try:
            with record_progress(self.current_phase.progress):
                yield
            self.on_phase_end(name, time.monotonic() - self.current_phase.start)
        except Exception as error:
            annotate_error(error, phase=name, step=self.step + 1)
            raise
        finally:
            self.current_phase = outer
            self.spans.append(Span(name, start, time.time()))

    def step_done(self) -> None:
        """Count a completed step."""
        self.step += 1

    def snapshot(self) -> StatusSnapshot:
        """Return the current status. Thread-safe."""
        phase = self.current_phase
        counts = [phase.progress.read(), *self._counts_of_ranks(phase)]
        done, units = (sum(column) for column in zip(*counts, strict=True))
        startup, startup_seconds = current_startup_phase()
        return StatusSnapshot(
            step=self.step,
            total=self.total,
            phase=PHASE_NAMES.get(phase.key, phase.key),
            phase_seconds=time.monotonic() - phase.start,
            done=done,
            units=units,
            problem=self.problem,
            hang=self.hang,
            pid=os.getpid(),
            host=socket.gethostname(),
            activity=self.activity,
            starting=self.starting,
            startup=startup,
            startup_seconds=startup_seconds,
        )

    def _counts_of_ranks(self, phase: Phase) -> list[tuple[int, int]]:
        """Return (done, total) of every rank that works in the phase."""
        if not self._counts_ranks:
            return []
        try:
            # Worker classes of users may have no `progress`.
            counting = [group for group in phase.groups if hasattr(group, "progress")]
            answers = [counts for group in counting for counts in group.query_ranks("progress", _PROGRESS_TIMEOUT_S)]
            return [counts for counts in answers if counts is not None]
        except Exception as error:  # noqa: BLE001 - logged once; a missing count must not end a training run
            self._counts_ranks = False
            logger.warning("progress inside phases is not shown any more: %r", error)
            return []


class Phases:
    """Measures seconds and, on GPUs, memory per phase of one training step: the peak (`name`) and the value at its end
    (`name/after`).

    Memory is requested only from the workers of a phase, at its end, because a request takes milliseconds. The peak of
    a phase includes the peaks of nested phases.
    """

    def __init__(
        self,
        status: RunStatus,
        memory: Callable[[tuple[Any, ...]], tuple[float, float]] | None = None,
        on_enter: Callable[[str], None] = lambda name: None,
    ) -> None:
        """`memory(groups)` returns (peak since the last call, current) in GB, the maximum over the ranks.

        `on_enter(name)` is called before a phase begins, and may raise to prevent it.
        """
        self._status, self._memory, self._on_enter = status, memory, on_enter
        self._running: dict[str, float] = {}
        self._peaks: list[float] = []
        self.seconds: dict[str, float] = {}
        self.memory_gb: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str, *groups: Any) -> Iterator[None]:
        """Measure a phase in which these worker groups work. The time of a phase includes nested phases."""
        self._on_enter(name)
        start, inner = time.perf_counter(), len(self._peaks)
        self._running[name] = start
        try:
            with self._status.phase(name, *groups):
                yield
        finally:
            self._running.pop(name, None)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        working = tuple(group for group in groups if group is not None)
        if self._memory is not None and working:
            peak, self.memory_gb[f"{name}/after"] = self._memory(working)
            self._peaks.append(peak)
        if self._peaks[inner:]:
            self.memory_gb[name] = max(self.memory_gb.get(name, 0.0), *self._peaks[inner:])

    def is_running(self, name: str) -> bool:
        """Return whether this phase is running."""
        return name in self._running

    def elapsed(self) -> dict[str, float]:
        """Return the seconds per phase so far, including running phases. Thread-safe."""
        now, seconds = time.perf_counter(), dict(self.seconds)
        for name, start in dict(self._running).items():
            seconds[name] = seconds.get(name, 0.0) + now - start
        return seconds


def memory_gb(groups: tuple[Any, ...]) -> tuple[float, float]:
    """Return (peak since the last call, current) memory, the maximum over the ranks. Dead ranks are ignored: their next
    call raises an error."""
    ranks = [
        memory for group in groups for memory in group.query_ranks("memory_gb", _MEMORY_TIMEOUT_S) if memory is not None
    ]
    return max((peak for peak, _ in ranks), default=0.0), max((now for _, now in ranks), default=0.0)
