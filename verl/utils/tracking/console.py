"""Metrics for a person watching: the headline first, then a line per group; coloured on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from verl.utils.tracking.tracker import Generation, Run, Tracker

# What a person looks for first, under the short names used in the documentation.
_HEADLINE = {
    "reward/mean": "reward_mean",
    "kl/mean": "kl",
    "actor/loss": "actor_loss",
    "critic/loss": "critic_loss",
    "train/loss": "train_loss",
    "val/loss": "val_loss",
    "val/accuracy": "val_accuracy",
}
_SAMPLE_CHARS = 200


class Console(Tracker):
    """Writes to standard output."""

    def __init__(self, run: Run | None = None, stream: TextIO | None = None) -> None:
        self._given = stream

    def log(self, data: Mapping[str, Any], step: int) -> None:
        headline = [f"{short}={_text(data[key])}" for key, short in _HEADLINE.items() if key in data]
        rest = {key: _text(data[key]) for key in sorted(data) if key not in _HEADLINE}
        if self._stream.isatty():
            self._print_grouped(f"step {step}", headline, rest)
        else:
            self._write(f"step {step}: " + "\n  ".join(_plain_lines(headline, rest)))

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        for sample in samples:
            given, answer = _one_line(sample.input), _one_line(sample.output)
            self._write(f"step {step}: validation sample, score={_text(sample.score)}: {given} -> {answer}")

    def close(self) -> None:
        self._stream.flush()

    @property
    def _stream(self) -> TextIO:
        # Looked up each time: programs (and pytest) replace sys.stdout while they run.
        return self._given or sys.stdout

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


def _plain_lines(headline: list[str], rest: Mapping[str, str]) -> list[str]:
    """Metrics under their whole names, so that a log can be searched for them."""
    groups: dict[str, list[str]] = {"": headline} if headline else {}
    for key, value in rest.items():
        groups.setdefault(key.partition("/")[0], []).append(f"{key}={value}")
    return [", ".join(entries) for entries in groups.values()]


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _one_line(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _SAMPLE_CHARS else flat[: _SAMPLE_CHARS - 1] + "…"
