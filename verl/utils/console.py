"""Console output: lines of steps, start-up phases, and a status line at the bottom of a terminal."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

logger = logging.getLogger(__name__)

LINE, FULL = "line", "full"
"""Values of `trainer.console`."""

# Phase names on the console where they differ from those in metrics.
PHASE_NAMES = {
    "gen": "rollout",
    "values": "compute_values",
    "update_actor": "train_actor",
    "update_critic": "train_critic",
    "testing": "validation",
}
# Phases after the step, which its seconds do not include.
AFTER_STEP = ("testing", "save_checkpoint")
# `timing_s/*` that is not the time of a phase.
_NO_PHASES = frozenset({"step", "waiting_for_one_rank", "record", *AFTER_STEP})

# The most important metrics, in this order, under the short names of the documentation.
HEADLINE = {
    "reward/mean": "reward_mean",
    "kl/mean": "kl",
    "actor/loss": "actor_loss",
    "critic/loss": "critic_loss",
    "train/loss": "train_loss",
    "val/loss": "val_loss",
    "val/accuracy": "val_accuracy",
}
_MORE = {"train/accuracy": "train_accuracy", "actor/entropy": "entropy", "train/grad_norm": "grad_norm"}
# Shown if not 0.
_PROBLEMS = {
    "reward/errors": "reward_errors",
    "actor/skipped_steps": "actor_updates_skipped",
    "critic/skipped_steps": "critic_updates_skipped",
    "train/skipped_steps": "updates_skipped",
}
_ACCURACY = re.compile(r"val/(?P<source>.+)/accuracy")
_CORE = re.compile(r"val-core/(?P<source>.+)/[^/]+/(mean@\d+)")
_MAX_SOURCES = 3
_MAX_OTHER = 8
_MAX_PHASES = 5


def step_line(metrics: Mapping[str, Any], step: int, eta: float | None = None, notes: Sequence[str] = ()) -> str:
    """Return `step N: reward_mean=…, … | 1.6 s (rollout 0.9, …) | 3011 tokens/s | ETA 15 s`.

    `eta`: seconds until the end of the run. `notes`: further texts for this step. Metrics without a place in the line
    appear only if the line would otherwise be empty.
    """
    parts = [_headline(metrics), *notes, _seconds_text(metrics), _speed(metrics)]
    parts = [part for part in parts if part]
    if not parts:
        parts = [", ".join(f"{key}={format_value(metrics[key])}" for key in sorted(metrics)[:_MAX_OTHER])]
    if eta is not None:
        parts.append(f"ETA {format_duration(eta, digits=0)}")
    return f"step {step}: " + " | ".join(parts)


def validation_scores(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the main score of each data source of a validation by its name on the console.

    The score is the accuracy; without one, the mean that `val-core` has. Its name is `val_accuracy(SOURCE)` or
    `val_score(SOURCE)`, without the source if there is only one.
    """
    scores: dict[str, tuple[str, float]] = {}
    for name, pattern in (("val_accuracy", _ACCURACY), ("val_score", _CORE)):
        for key, value in metrics.items():
            match = pattern.fullmatch(key)
            if match is not None and isinstance(value, int | float):
                scores.setdefault(match["source"], (name, float(value)))
    if len(scores) == 1:
        return dict(scores.values())
    return {f"{name}({source})": value for source, (name, value) in scores.items()}


def phase_seconds(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of the phases of a step by their names on the console, longest first; `other` is the
    remainder."""
    timed = {key.removeprefix("timing_s/"): float(metrics[key]) for key in metrics if key.startswith("timing_s/")}
    phases = {PHASE_NAMES.get(name, name): value for name, value in timed.items() if name not in _NO_PHASES}
    if phases and "step" in timed:
        phases["other"] = max(0.0, timed["step"] - sum(phases.values()))
    return dict(sorted(phases.items(), key=lambda item: -item[1]))


def format_value(value: Any) -> str:
    """Return a number with four digits; other values unchanged."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def format_duration(seconds: float, digits: int = 2) -> str:
    """Return a duration: `0.16 s`, `12.3 s`, `4 min 05 s`, `2 h 07 min`. `digits`: the most decimal places."""
    if seconds < 9.995:
        return f"{seconds:.{digits}f} s"
    if seconds < 99.95:
        return f"{seconds:.{min(digits, 1)}f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _headline(metrics: Mapping[str, Any]) -> str:
    entries = {short: metrics[key] for key, short in HEADLINE.items() if key in metrics}
    entries |= {short: metrics[key] for key, short in _MORE.items() if key in metrics}
    texts = [f"{name}={format_value(value)}" for name, value in entries.items()]
    if "response_length/mean" in metrics:
        cut = metrics.get("response_length/clip_ratio", 0.0)
        texts.append(f"length={metrics['response_length/mean']:.4g}" + (f" ({cut:.1%} cut)" if cut else ""))
    texts += _validation_texts(validation_scores(metrics))
    texts += [f"{short}={metrics[key]:g}" for key, short in _PROBLEMS.items() if metrics.get(key)]
    return ", ".join(texts)


def _validation_texts(scores: Mapping[str, float]) -> list[str]:
    if len(scores) > _MAX_SOURCES:
        mean = sum(scores.values()) / len(scores)
        return [f"val_mean={mean:.4g} ({len(scores)} sources)"]
    return [f"{name}={value:.4g}" for name, value in scores.items()]


def _seconds_text(metrics: Mapping[str, Any]) -> str:
    """Return the seconds of the step with its longest phases, and those of validation and save."""
    if "timing_s/step" not in metrics:
        return ""
    text = format_duration(metrics["timing_s/step"])
    phases = [(name, seconds) for name, seconds in phase_seconds(metrics).items() if name != "other"]
    if phases:
        shown, rest = phases[:_MAX_PHASES], metrics["timing_s/step"]
        rest -= sum(seconds for _, seconds in shown)
        shown = [*shown, ("other", max(0.0, rest))]
        text += " (" + ", ".join(f"{name} {_short(seconds)}" for name, seconds in shown) + ")"
    for name in AFTER_STEP:
        if f"timing_s/{name}" in metrics:
            text += f" + {PHASE_NAMES.get(name, name)} {format_duration(metrics[f'timing_s/{name}'])}"
    return text


def _short(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 9.995 else f"{seconds:.1f}"


def _speed(metrics: Mapping[str, Any]) -> str:
    tokens, seconds = metrics.get("perf/total_num_tokens"), metrics.get("perf/time_per_step")
    return f"{tokens / seconds:.0f} tokens/s" if tokens and seconds else ""


# ---------------------------------------------------------------- status line

_CLEAR = "\r\x1b[2K"
_DEFAULT_COLUMNS = 80
# Streams that replaced sys.stdout and sys.stderr. They are kept alive: a `print` in another thread, which uses a
# borrowed reference, would crash if they were freed when the line is closed.
_replaced: list[Any] = []


def is_terminal() -> bool:
    """Return whether both standard streams are terminals: in a file or a pipe there is no status line."""
    return sys.stdout.isatty() and sys.stderr.isatty()


@contextmanager
def status_line() -> Iterator[StatusLine]:
    """Context with a status line on the terminal of stderr; sys.stdout and sys.stderr are replaced, so that other
    output clears the line before it is written."""
    stdout, stderr = sys.stdout, sys.stderr
    line = StatusLine(stderr)
    sys.stdout, sys.stderr = line.above(stdout), line.above(stderr)
    _replaced.extend((sys.stdout, sys.stderr))
    try:
        yield line
    finally:
        line.close()
        sys.stdout, sys.stderr = stdout, stderr


class StatusLine:
    """`show(text)` draws or replaces the line. Thread-safe, also in signal handlers."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._lock = threading.RLock()  # a signal handler may write while this thread does
        self._text = ""
        self._at_line_start = True

    def show(self, text: str) -> None:
        """Replace the line; it is cut to the width of the terminal."""
        with self._lock:
            self._text = text
            if self._at_line_start:
                self._draw(_CLEAR + self._fitting())

    def close(self) -> None:
        """Remove the line."""
        with self._lock:
            if self._text and self._at_line_start:
                self._draw(_CLEAR)
            self._text = ""

    def above(self, stream: Any) -> _StreamAbove:
        """Return a stream whose text appears above the line."""
        return _StreamAbove(self, stream)

    def write_above(self, stream: Any, text: str) -> int:
        """Write other output: clear the line, write, draw the line again once the output is at the start of a line."""
        with self._lock:
            if self._text and self._at_line_start:
                self._draw(_CLEAR)
            count = stream.write(text)
            self._at_line_start = text.endswith("\n") if text else self._at_line_start
            if self._text and self._at_line_start:
                stream.flush()
                self._draw(self._fitting())
            return int(count)

    def _draw(self, text: str) -> None:
        if self._stream.isatty():  # else the terminal was closed, and output goes to a file
            self._stream.write(text)
            self._stream.flush()

    def _fitting(self) -> str:
        """The text, cut to one column less than the terminal has, since the last column may wrap."""
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError, AttributeError):
            columns = 0
        return cut_to_width(self._text, (columns or _DEFAULT_COLUMNS) - 1)


class _StreamAbove:
    """A standard stream that writes above a status line; all other attributes are those of the stream."""

    def __init__(self, line: StatusLine, stream: Any) -> None:
        self._line, self._stream = line, stream

    def write(self, text: str) -> int:
        return self._line.write_above(self._stream, text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def cut_to_width(text: str, columns: int) -> str:
    """Return the beginning of the text that fits into this many columns; `…` marks a cut."""
    if sum(map(_width, text)) <= columns:
        return text
    used, kept = 0, []
    for character in text:
        used += _width(character)
        if used > columns - 1:
            break
        kept.append(character)
    return "".join(kept) + "…" if columns > 0 else ""


def _width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


# ---------------------------------------------------------------- start-up phases

_current: tuple[str, float] | None = None
_enabled = False
# Shorter phases are not logged.
SHORTEST_S = 0.1
_REDRAW_S = 0.5
# Interval of checks and interval of log lines: at most their sum, ten seconds, passes between two lines.
POLL_S, LOG_INTERVAL_S = 2.0, 8.0


def log_startup_phases(enabled: bool) -> None:
    """Set whether phases of this process log their duration; by default they do not."""
    global _enabled
    _enabled = enabled


@contextmanager
def startup_phase(name: str) -> Iterator[None]:
    """Context of a phase; at its end it logs `start-up: NAME 3.4 s`."""
    global _current
    outer, start = _current, time.monotonic()
    _current = name, start
    try:
        yield
        seconds = time.monotonic() - start
        if _enabled and seconds >= SHORTEST_S:
            logger.info("start-up: %s %s", name, format_duration(seconds))
    finally:
        _current = outer


def current_startup_phase() -> tuple[str, float]:
    """Return (name, seconds so far) of the current phase; ("", 0.0) outside of phases. Thread-safe."""
    phase = _current
    return ("", 0.0) if phase is None else (phase[0], time.monotonic() - phase[1])


def startup_text(name: str, seconds: float, activity: str | None = None) -> str:
    """Return the text of a running phase; `activity`: what the ranks do in it."""
    return f"start-up: {name}{f' ({activity})' if activity else ''}, {seconds:.0f} s so far"


class StartupLog:
    """Called every two seconds with the running phase: logs a line for every 8 s of it."""

    def __init__(self) -> None:
        self._name, self._logged_at = "", 0.0

    def __call__(self, name: str, seconds: float, activity: str | None = None) -> None:
        """`name`: empty outside of phases."""
        if name != self._name or seconds < self._logged_at:
            self._name, self._logged_at = name, 0.0
        if name and seconds - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = seconds
            logger.info("%s", startup_text(name, seconds, activity))


@contextmanager
def show_startup(enabled: bool = True) -> Iterator[None]:
    """Context in which a thread shows the running phase of this process: on a terminal as a status line, else as a log
    line every eight seconds."""
    if not enabled:
        yield
        return
    done, log = threading.Event(), StartupLog()
    with status_line() if is_terminal() else nullcontext() as line:

        def keep_showing() -> None:
            while not done.wait(POLL_S if line is None else _REDRAW_S):
                name, seconds = current_startup_phase()
                if line is None:
                    log(name, seconds)
                elif name:
                    line.show(startup_text(name, seconds))

        thread = threading.Thread(target=keep_showing, name="startup", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(timeout=5)
