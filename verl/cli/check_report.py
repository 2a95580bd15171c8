"""The report of `verl check`: sections, rows with labelled tokens, lengths, and the problems at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl.config.problems import Report

TRAINED, NOT_TRAINED, SCORED = "trained", "not trained", "scored"
"""Labels of tokens. `SCORED`: the reward model reads the score of the response at this token."""
_HIGHLIGHTED = (TRAINED, SCORED)
# Keys whose problems concern only this machine: the run may start on another one.
_MACHINE_KEYS = ("trainer.device", "trainer.logger")
_MAX_TEXT = 600  # characters of a segment
_QUANTILES = (0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a row with the same label."""

    token_ids: Sequence[int]
    label: str


@dataclass
class ReportOutput:
    """Prints sections of the report and collects problems."""

    console: Console = field(default_factory=lambda: Console(highlight=False, soft_wrap=True))
    problems: list[str] = field(default_factory=list)

    def section(self, title: str) -> None:
        self.console.print(f"\n[bold]== {escape(title)}[/]")

    def line(self, text: str) -> None:
        self.console.print(escape(text))

    def problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)
            self.console.print(f"[red]problem:[/] {escape(text)}")

    def configuration(self, config: Any, report: Report, checked_later: Sequence[str] = ()) -> None:
        """Print the section of the configuration, without problems of this machine and of keys `checked_later`."""
        self.section("configuration")
        for problem in report.problems:
            if problem.key not in (*_MACHINE_KEYS, *checked_later):
                self.problem(str(problem))
        for notice in (*config.notices, *report.notices):
            self.line(f"note: {notice}")
        self.line(f"{len(config.changed)} keys differ from their defaults")

    def segments(self, title: str, segments: Sequence[Segment], tokenizer: Any) -> None:
        """Print a row: label, number of tokens and text of each segment."""
        table = Table("", "tokens", "text", title=escape(title), title_justify="left", show_lines=True)
        for segment in segments:
            text = tokenizer.decode(segment.token_ids, skip_special_tokens=False)
            shown = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"
            label = f"[green]{segment.label}[/]" if segment.label in _HIGHLIGHTED else segment.label
            table.add_row(label, str(len(segment.token_ids)), escape(shown))
        self.console.print(table)

    def quantiles(self, name: str, values: Sequence[int]) -> None:
        """Print quantiles and the sum of numbers of tokens; nothing without numbers."""
        if not values:
            return
        import numpy as np

        quantiles = ", ".join(f"{share:.0%} ≤ {int(np.quantile(values, share))}" for share in _QUANTILES)
        self.line(f"{name}: {quantiles}; {sum(values)} in total")

    def verdict(self) -> int:
        """Print all problems again; return the exit code."""
        self.section("result")
        for number, problem in enumerate(self.problems, start=1):
            self.console.print(f"[red]{number}.[/] {escape(problem)}")
        self.console.print("[red]not ready[/]" if self.problems else "[green]ok[/]: the run can start")
        return int(bool(self.problems))
