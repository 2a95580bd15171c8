"""Console of the driver: the status of the run, and the output of actors.

A thread shows the status: on a terminal as a status line or bars, elsewhere as log lines. Ray prints the lines of all
actors with a coloured prefix. With `trainer.console=line`, WorkerOutput prints these lines without the prefix, and
ControllerOutput prints the lines of the controller in order and complete.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TextIO

from verl.trainer.common.run_status import StatusSnapshot
from verl.utils.console import (
    LINE,
    StartupLog,
    current_startup_phase,
    format_duration,
    is_terminal,
    startup_text,
    status_line,
)

logger = logging.getLogger(__name__)

_REDRAW_S = 0.5
LOG_POLL_S = 2.0
_LOG_INTERVAL_S = 30.0
# Together with LOG_POLL_S: at least one line every ten seconds before the first step.
_STARTUP_INTERVAL_S = 8.0
# The name of Ray's own handler: Ray removes the handler of this name when it disconnects.
_RAY_HANDLER = "ray_print_logs"
# Values of the field `pid` in messages of Ray itself.
_RAY_PROCESSES = ("autoscaler", "raylet", "gcs_server")
# Text in the lines of ray.experimental.tqdm_ray, which Ray shows as progress bars.
_RAY_BAR = "__ray_tqdm_magic_token__"
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Marks the end of the controller's output on its stdout.
_END = ":verl-controller-output-ends:"
# Ray reads the files of actors every 100 to 500 ms.
END_TIMEOUT_S = 3.0


@contextmanager
def show_status(snapshot: Callable[[], StatusSnapshot | None], console: str = LINE) -> Iterator[None]:
    """Context in which a thread shows `snapshot()` repeatedly; None: the controller has not reported yet.

    `console`: `trainer.console`. With `line`, a terminal shows a status line; if the output is no terminal, long
    start-up phases are logged. With `full`, a terminal shows progress bars, without the start-up.
    """
    draws = is_terminal() if console == LINE else sys.stderr.isatty()
    done, waiting_since = threading.Event(), time.monotonic()
    with _display(console, draws) as show:

        def keep_showing() -> None:
            try:
                while not done.wait(_REDRAW_S if draws else LOG_POLL_S):
                    now = snapshot()
                    if console == LINE:
                        show(with_startup(now, waiting_since))
                    elif now is not None and now.total:
                        show(now)
            except Exception as error:  # noqa: BLE001 - logged; the run continues without its bar
                if not done.is_set():
                    logger.warning("progress is not shown any more: %r", error)

        thread = threading.Thread(target=keep_showing, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(timeout=5)


def _display(console: str, draws: bool) -> AbstractContextManager[Callable[[StatusSnapshot], None]]:
    """Return the context with the function that shows a status. `draws`: on a terminal."""
    if console == LINE:
        return _status_line() if draws else nullcontext(StartupProgressLog())
    return progress_bars() if draws else nullcontext(ProgressLog())


def with_startup(now: StatusSnapshot | None, waiting_since: float) -> StatusSnapshot:
    """Return the status with the start-up phase of this process, unless the controller is in such a phase.

    `waiting_since`: time since which this process has waited for the first status of the controller.
    """
    name, seconds = current_startup_phase()
    if now is None:
        waited = time.monotonic() - waiting_since
        name, seconds = (name, seconds) if name else ("controller process", waited)
        return StatusSnapshot(0, 0, starting=True, startup=name, startup_seconds=seconds)
    return replace(now, startup=name, startup_seconds=seconds) if name and not now.startup else now


class ProgressLog:
    """Logs a line for every 30 s of a phase; shorter phases are not logged."""

    starting_interval = _LOG_INTERVAL_S
    """Seconds between two lines before the first step."""

    def __init__(self) -> None:
        self._last: StatusSnapshot | None = None
        self._logged_at = 0.0

    def __call__(self, now: StatusSnapshot) -> None:
        if _is_new_phase(self._last, now):
            self._logged_at = 0.0
        self._last = now
        interval = self.starting_interval if now.starting else _LOG_INTERVAL_S
        if now.phase and now.phase_seconds - self._logged_at >= interval:
            self._logged_at = now.phase_seconds
            count = f" {now.done}/{now.units}" if now.units else ""
            logger.info("step %d/%d: %s%s, %.0f s", now.step + 1, now.total, now.phase, count, now.phase_seconds)


class StartupProgressLog(ProgressLog):
    """Also logs a line every 8 s during the start-up and during phases before the first step."""

    starting_interval = _STARTUP_INTERVAL_S

    def __init__(self) -> None:
        super().__init__()
        self._log_startup = StartupLog()

    def __call__(self, now: StatusSnapshot) -> None:
        self._log_startup(now.startup, now.startup_seconds, now.activity)
        if now.total:
            super().__call__(now)


class StatusText:
    """Text of the status line: step, phase, samples and remaining time."""

    def __init__(self) -> None:
        # Step and time of the first status after the start-up, and of the first one with the current step.
        self._first: tuple[int, float] | None = None
        self._current = (0, 0.0)

    def __call__(self, now: StatusSnapshot, time_now: float) -> str:
        """`time_now`: seconds of a monotonic clock."""
        if now.startup and (now.starting or not now.total):
            return startup_text(now.startup, now.startup_seconds, now.activity)
        if not now.total:
            return "starting" if now.starting else "running"
        parts = [f"step {min(now.step + 1, now.total)}/{now.total}"]
        if now.label:
            count = f" {now.done}/{now.units}" if now.units else ""
            parts.append(f"{now.label}{count} {now.phase_seconds:.0f} s")
        eta = None if now.starting else self._remaining_seconds(now, time_now)
        if eta is not None:
            parts.append(f"ETA {format_duration(eta, digits=0)}")
        if now.problem:
            parts.append(now.problem)
        return " | ".join(parts)

    def _remaining_seconds(self, now: StatusSnapshot, time_now: float) -> float | None:
        """Return the seconds until the last step; None before the first step is complete."""
        if self._first is None:
            self._first = now.step, time_now
        if now.step != self._current[0]:
            self._current = now.step, time_now
        (first, start), (step, begin) = self._first, self._current
        if step <= first:
            return None
        per_step = (begin - start) / (step - first)
        return max(0.0, per_step * (now.total - step) - (time_now - begin))


@contextmanager
def _status_line() -> Iterator[Callable[[StatusSnapshot], None]]:
    text = StatusText()
    with status_line() as line:
        yield lambda now: line.show(text(now, time.monotonic()))


# rich replaces sys.stdout and sys.stderr by these streams. They are kept alive, because a `print` in another thread,
# which uses a borrowed reference, would crash if they were freed when the bars are closed.
_rich_streams: list[TextIO] = []


@contextmanager
def progress_bars() -> Iterator[_ProgressBars]:
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
        _rich_streams.extend((sys.stdout, sys.stderr))
        yield _ProgressBars(rows)


class _ProgressBars:
    """Two rows of a rich `Progress`: the steps, and the samples of the current phase."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self._steps = rows.add_task("steps", total=None, count="")
        self._phase = rows.add_task("starting", total=None, count="")
        self._last: StatusSnapshot | None = None

    def __call__(self, now: StatusSnapshot) -> None:
        if not self.rows.console.is_terminal:  # the terminal was closed: further drawing would fill a file
            self.rows.stop()
        self.rows.update(self._steps, completed=now.step, total=now.total, count=f"{now.step}/{now.total}")
        if _is_new_phase(self._last, now):
            # A new row restarts the elapsed time and the estimate.
            self.rows.remove_task(self._phase)
            self._phase = self.rows.add_task(now.label, total=None, count="", visible=bool(now.label))
        if now.units:  # 0 when ranks are done: keep the last count until the phase ends
            self.rows.update(self._phase, completed=now.done, total=now.units, count=f"{now.done}/{now.units}")
        self._last = now


def _is_new_phase(before: StatusSnapshot | None, now: StatusSnapshot) -> bool:
    if before is None or (before.step, before.label) != (now.step, now.label):
        return True
    return now.phase_seconds < before.phase_seconds  # the same phase again: a step may generate several times


# -------------------------------------------------------------------- output of Ray's processes


class WorkerOutput:
    """Prints the lines of actors and tasks in place of Ray: without prefix, without colours outside of a terminal.

    Like Ray, it prints a line that several processes write within a few seconds once, and later once more with the
    number of processes. Used by the driver, after `ray.init`.
    """

    def __init__(self) -> None:
        from ray._private import ray_logging

        dispatcher = ray_logging.global_worker_stdstream_dispatcher
        if not sys.stdout.isatty():
            os.environ.setdefault("RAY_COLOR_PREFIX", "0")
        # Not Ray's own deduplicators, whose pending lines Ray prints with prefix and colours when it disconnects.
        window, self._lock = ray_logging.RAY_DEDUP_LOGS_AGG_WINDOW_S, threading.Lock()
        self._deduplicators = {is_err: ray_logging.LogDeduplicator(window, None, None) for is_err in (False, True)}
        handlers = [handle for name, handle in dispatcher.handlers if name == _RAY_HANDLER]
        self.is_active = bool(handlers)
        """False with `ray.init(log_to_driver=False)`."""
        if handlers:
            self._print_as_ray = handlers[0]
            dispatcher.remove_handler(_RAY_HANDLER)
            dispatcher.add_handler(_RAY_HANDLER, self._print)

    def flush(self) -> None:
        """Print the repeated lines that have not been printed yet; called at the end of a run."""
        with self._lock:
            batches = [batch for deduplicator in self._deduplicators.values() for batch in deduplicator.flush()]
        for batch in batches:
            _write_lines(batch)

    def _print(self, data: dict[str, Any]) -> None:
        # Messages of Ray itself, and bars of `ray.experimental.tqdm_ray`.
        if data.get("pid") in _RAY_PROCESSES or any(_RAY_BAR in line for line in data["lines"]):
            return self._print_as_ray(data)
        with self._lock:
            batches = self._deduplicators[bool(data["is_err"])].deduplicate(data)
        for batch in batches:
            _write_lines(batch)


@contextmanager
def without_prefixes() -> Iterator[None]:
    """Context in which `WorkerOutput` prints the lines of actors and tasks."""
    output = WorkerOutput()
    try:
        yield
    finally:
        output.flush()


def _write_lines(batch: Mapping[str, Any]) -> None:
    """Write the lines of a process to the driver's stream; of a process on another node with its address."""
    if not batch["lines"]:
        return
    stream = sys.stderr if batch["is_err"] else sys.stdout
    is_local = batch.get("ip") == batch.get("localhost")
    text = "".join(f"{'' if is_local else batch['ip'] + ': '}{line}\n" for line in batch["lines"])
    stream.write(text if stream.isatty() else _ANSI.sub("", text))
    stream.flush()


class ControllerOutput(WorkerOutput):
    """Prints the lines of the controller as they were written, in order and complete."""

    def __init__(self, actor_name: str) -> None:
        """`actor_name`: class name of the controller."""
        self._actor_name, self.ended = actor_name, threading.Event()
        self.has_started = False
        """Whether the controller has written a line, so that it has started."""
        super().__init__()
        if not self.is_active:
            self.ended.set()

    def wait_for_end(self, timeout: float = END_TIMEOUT_S) -> None:
        """Wait until everything that the controller has written is printed, up to `timeout` seconds. Returns at once if
        it has written nothing: a user's own class need not mark the end."""
        if self.has_started:
            self.ended.wait(timeout)
        self.flush()

    def _print(self, data: dict[str, Any]) -> None:
        if data.get("actor_name") != self._actor_name:
            return super()._print(data)
        self.has_started = True
        lines = [line for line in data["lines"] if line != _END]
        if lines:
            stream = sys.stderr if data["is_err"] else sys.stdout
            stream.write("\n".join([*lines, ""]))
            stream.flush()
        if len(lines) < len(data["lines"]):
            self.ended.set()


def end_controller_output() -> None:
    """In the controller: mark the end of its output on stdout, for `wait_for_end`."""
    sys.stdout.write(f"{_END}\n")
    sys.stdout.flush()
