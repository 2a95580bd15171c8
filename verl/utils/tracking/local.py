"""Trackers on this machine: the console, JSON lines and TensorBoard."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TextIO

from verl.utils.console import HEADLINE, LINE, format_value, step_line
from verl.utils.disk import JsonLines, to_json
from verl.utils.logging_setup import collect_step_notes, take_step_notes
from verl.utils.tracking import Generation, TrackedRun, Tracker, numbers_in, register_tracker

# Number of steps from which the remaining time is estimated.
_ETA_STEPS = 20
_SAMPLE_CHARS = 200


@register_tracker("console")
class Console(Tracker):
    """Writes to standard output: one line per step (`trainer.console=line`), or the headline first, then a line per
    group of metrics, coloured on a terminal."""

    on_console: ClassVar[bool] = True

    def __init__(self, run: TrackedRun | None = None, stream: TextIO | None = None) -> None:
        self._stream_override = stream
        self._one_line = run is not None and run.console == LINE
        self._total_steps = None if run is None else run.total_steps
        self._logged: deque[tuple[int, float]] = deque(maxlen=_ETA_STEPS + 1)
        """Steps and the times at which they were logged."""
        if self._one_line:
            collect_step_notes(True)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        if self._one_line:
            self._logged.append((step, time.monotonic()))
            return self._write(step_line(data, step, self._remaining_seconds(data), take_step_notes()))
        headline = [f"{short}={format_value(data[key])}" for key, short in HEADLINE.items() if key in data]
        rest = {key: format_value(data[key]) for key in sorted(data) if key not in HEADLINE}
        if self._stream.isatty():
            self._print_grouped(f"step {step}", headline, rest)
        else:
            self._write(f"step {step}: " + "\n  ".join(_plain_lines(headline, rest)))

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        for sample in samples:
            prompt, response = _one_line(sample.input), _one_line(sample.output)
            self._write(f"step {step}: validation sample, score={format_value(sample.score)}: {prompt} -> {response}")

    def close(self) -> None:
        if self._one_line:
            collect_step_notes(False)
        self._stream.flush()

    def _remaining_seconds(self, data: Mapping[str, Any]) -> float | None:
        """Return the seconds until the last step; None: unknown, or no step is left."""
        (first, start), (last, end) = self._logged[0], self._logged[-1]
        if self._total_steps is None or last >= self._total_steps:
            return None
        per_step = (end - start) / (last - first) if last > first else data.get("timing_s/step")
        return None if per_step is None else per_step * (self._total_steps - last)

    @property
    def _stream(self) -> TextIO:
        # Looked up each time: programs (and pytest) replace sys.stdout while they run.
        return self._stream_override or sys.stdout

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()

    def _print_grouped(self, title: str, headline: list[str], rest: Mapping[str, str]) -> None:
        from rich.console import Console as RichConsole
        from rich.table import Table
        from rich.text import Text

        groups: dict[str, list[str]] = {}
        for key, value in rest.items():
            group, _, name = key.rpartition("/")
            groups.setdefault(group, []).append(f"{name}={value}")
        table = Table.grid(padding=(0, 2))
        for group, entries in groups.items():
            table.add_row(Text(f"  {group}", style="cyan"), Text("  ".join(entries)))
        console = RichConsole(file=self._stream)
        console.print(Text.assemble((title, "bold"), "  ", ("  ".join(headline), "green")))
        console.print(table)


@register_tracker("file")
class JsonFiles(Tracker):
    """`metrics.jsonl` (one object per step), `generations.jsonl` (one per sample) and `config.json`.

    Each record is one unbuffered write, so a killed run keeps every step. If `first_step` is known, records of that
    step and later ones (of repeated steps, or of another run of the same name) move to `<name>.superseded.jsonl`;
    metrics logged for the step before it are added to its record. NaN and infinities, which JSON lacks, are the strings
    "nan", "inf", "-inf", which `float(value)` converts back.
    """

    def __init__(self, run: TrackedRun) -> None:
        directory, first_step = run.directory, run.first_step
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(to_json(run.config, indent=2) + "\n", encoding="utf-8")
        self._metrics = JsonLines(directory / "metrics.jsonl")
        self._generations = JsonLines(directory / "generations.jsonl")
        if first_step is not None:
            self._metrics.supersede(first_step)
            self._generations.supersede(first_step)
        self._resumed_step = None if first_step is None else first_step - 1

    def log(self, data: Mapping[str, Any], step: int) -> None:
        record = {"step": step, "time": round(time.time(), 3), "data": dict(data)}
        if step == self._resumed_step and self._metrics.merge_into_last(record):
            return
        self._metrics.append([record])

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        self._generations.append([{"step": step, **sample._asdict()} for sample in samples])

    def close(self) -> None:
        self._metrics.close()
        self._generations.close()

    @classmethod
    def folder(cls, run: TrackedRun) -> Path | None:
        return run.directory


@register_tracker("tensorboard", package="tensorboard")
class TensorBoard(Tracker):
    """A folder for `tensorboard --logdir`."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(run.directory), purge_step=run.first_step)
        self._writer.add_text("config", f"```\n{json.dumps(run.config, indent=2, default=str)}\n```")

    def log(self, data: Mapping[str, Any], step: int) -> None:
        for key, value in numbers_in(data).items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        for index, sample in enumerate(samples):
            text = f"score {sample.score}\n\n```\n{sample.input}\n```\n\n```\n{sample.output}\n```"
            self._writer.add_text(f"val/generations/{index}", text, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    @classmethod
    def folder(cls, run: TrackedRun) -> Path | None:
        return run.directory


def _plain_lines(headline: list[str], rest: Mapping[str, str]) -> list[str]:
    """Metrics under their full names, so that a log can be searched for them."""
    groups: dict[str, list[str]] = {"": headline} if headline else {}
    for key, value in rest.items():
        groups.setdefault(key.partition("/")[0], []).append(f"{key}={value}")
    return [", ".join(entries) for entries in groups.values()]


def _one_line(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _SAMPLE_CHARS else flat[: _SAMPLE_CHARS - 1] + "…"
