"""What the data check found, and how it looks on a terminal."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from rich.bar import Bar
from rich.console import Console, Group
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

JUDGED, AGENT = "a reward model", "its agent"
_QUANTILES = (0.5, 0.9, 0.99, 1.0)
_BINS = 12
_BAR = 40


@dataclass
class DataColumn:
    """A column over all files; the keys of `types` are its types, in the order of the files."""

    name: str
    types: dict[str, None] = field(default_factory=dict)
    nulls: int = 0


@dataclass
class Wiring:
    """How the rewards of one data source are connected."""

    rows: int
    function: str | None  # the task that scores it, JUDGED or AGENT; None: nothing does
    tried: int = 0  # ground truths given as the answer, in the right format
    right: int = 0  # and scored 1.0
    first_wrong: str | None = None

    def problem(self) -> str | None:
        """What to say about ground truths that do not score 1.0."""
        if self.first_wrong is None:
            return None
        more = self.tried - self.right - 1
        others = f" (and {more} more of the {self.tried} that were tried)" if more else ""
        return f"{self.first_wrong}{others}. Write it as its reward function expects."


@dataclass
class PromptLengths:
    """[rows] lengths of the prompts, and the limits they are held against."""

    values: np.ndarray
    unit: str
    limits: list[int]


@dataclass
class ShownRow:
    """One row: its place, the prompt, the other fields."""

    where: str
    prompt: str
    fields: dict[str, str]


@dataclass
class DataReport:
    """What was found; `problems` is empty for files that train."""

    files: list[tuple[str, int]] = field(default_factory=list)
    columns: list[DataColumn] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    wiring: dict[str, Wiring] = field(default_factory=dict)
    lengths: PromptLengths | None = None
    samples: list[ShownRow] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.files)


def show(report: DataReport, console: Console | None = None) -> None:
    """Everything, the verdict last."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 120)
    for file, rows in report.files:
        console.print(f"{escape(file)}: {rows} rows", soft_wrap=True)
    if report.columns:
        console.print(_schema(report))
    for sample in report.samples:
        console.print(_panel(sample))
    if report.lengths is not None and len(report.lengths.values):
        console.print(_histogram(report.lengths))
    if report.wiring:
        console.print(_rewards(report.wiring))
    for notice in report.notices:
        console.print(f"[yellow]note:[/yellow] {escape(notice)}", soft_wrap=True)
    for number, problem in enumerate(report.problems, start=1):
        console.print(f"[red]{number}.[/red] {escape(problem)}", soft_wrap=True)
    count = len(report.problems)
    verdict = (
        f"[bold red]{count} problem{'s' if count != 1 else ''}[/]" if count else "[bold green]ok[/]: these files train"
    )
    console.print(verdict)


def _schema(report: DataReport) -> Table:
    table = Table("column", "type", "null", title="columns", title_justify="left")
    for column in report.columns:
        nulls = f"[yellow]{column.nulls}[/]" if column.nulls else "0"
        table.add_row(escape(column.name), escape(" or ".join(column.types)), nulls)
    return table


def _panel(sample: ShownRow) -> Panel:
    lines = [escape(sample.prompt), ""]
    lines += [f"[cyan]{escape(name)}[/]: {escape(value)}" for name, value in sample.fields.items()]
    return Panel(Group(*lines), title=escape(sample.where), title_align="left")


def _histogram(lengths: PromptLengths) -> Group:
    values = lengths.values
    quantiles = ", ".join(f"{q:.0%} ≤ {int(np.quantile(values, q))}" for q in _QUANTILES)
    shares = "".join(f"; over {limit}: {(values > limit).mean():.2%}" for limit in lengths.limits)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(justify="right")
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    edges = _edges(values)
    # The last bin takes whatever is longer.
    counts = np.bincount(np.minimum(np.digitize(values, edges) - 1, len(edges) - 1), minlength=len(edges))
    for number, count in enumerate(counts.tolist()):
        last = number == len(edges) - 1
        label = f"{edges[number]}+" if last else f"{edges[number]}-{edges[number + 1] - 1}"
        over = any(edges[number] > limit for limit in lengths.limits[-1:])
        bar = Bar(int(counts.max()), 0, count, width=_BAR, color="red" if over else "blue")
        table.add_row(label, bar, str(count), f"{count / len(values):.1%}")
    return Group(f"[italic]prompt {lengths.unit}: {quantiles}{shares}[/]", table)


def _edges(values: np.ndarray) -> np.ndarray:
    """Where bins begin: round numbers, a dozen up to the length that all but one in a hundred keep."""
    low, high = int(values.min()), int(np.quantile(values, 0.99))
    rough = max(1.0, (high - low) / _BINS)
    power = 10 ** int(np.floor(np.log10(rough)))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return np.arange(low // step * step, high + 1, step)


def _rewards(wiring: dict[str, Wiring]) -> Table:
    table = Table("data_source", "rows", "reward function", "ground truths that score 1.0", title="rewards")
    table.title_justify = "left"
    for source, one in sorted(wiring.items()):
        color = "red" if one.right < one.tried else "green"
        right = f"[{color}]{one.right}/{one.tried}[/]" if one.tried else "-"
        table.add_row(escape(source), str(one.rows), one.function or "[red]none[/]", right)
    return table
