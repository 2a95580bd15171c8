"""How a run's progress is shown: bars for the steps and the phase on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.trainer.ppo.console import Standing

logger = logging.getLogger(__name__)

_REDRAW_S = 0.5
_LOOK_S = 5.0
_LINE_S = 30.0


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
                    if now is not None:
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
        yield Bars(rows)


class Bars:
    """Two rows of a rich `Progress`: the steps, and the samples of the phase that runs."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows
        self._steps = rows.add_task("steps", total=None, count="")
        self._phase = rows.add_task("starting", total=None, count="")
        self._last: Standing | None = None

    def __call__(self, now: Standing) -> None:
        self._rows.update(self._steps, completed=now.step, total=now.total, count=f"{now.step}/{now.total}")
        if _another_phase(self._last, now):
            # A new row, for its clock and its estimate start again.
            self._rows.remove_task(self._phase)
            self._phase = self._rows.add_task(now.phase, total=None, count="", visible=bool(now.phase))
        if now.units:  # the last count stays when the ranks are done and the phase is not
            self._rows.update(self._phase, completed=now.done, total=now.units, count=f"{now.done}/{now.units}")
        self._last = now


def _another_phase(before: Standing | None, now: Standing) -> bool:
    if before is None or (before.step, before.phase) != (now.step, now.phase):
        return True
    return now.phase_seconds < before.phase_seconds  # the same name again: a step may generate several times
