"""The commands of `data_check`: arguments, output and exit code.

- `python -m verl.utils.dataset.check FILE…`: can these files be trained on?
- `python -m verl.utils.reward_check FILE…`: can this reward be trusted?

Both take data files, keys of a training run (`data.prompt_key=question`) and options; some keys can also be written as
options (`--prompt-key question`). The exit code is 0 for yes and 1 for no. The data check caches tokenised prompts: a
training run on the same files and model reuses them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from rich.bar import Bar
from rich.console import Console, Group
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from verl.config import PPOConfig, load_config
from verl.trainer.data_check import (
    GROUND_TRUTHS_PER_SOURCE,
    NO_MODEL,
    REWARD_ROWS,
    CheckReport,
    DataColumn,
    PromptLengths,
    SampleRow,
    SourceReward,
    check_data,
    check_reward_function,
)

if TYPE_CHECKING:
    from verl.workers.reward_manager.check import RewardReport

_OVERRIDE = re.compile(r"\+{0,2}[A-Za-z_]\w*(\.[\w-]+)*=")
_FILES = "data.train_files"
_MODEL = "actor_rollout_ref.model.path"
# Options that are another spelling of a key.
_OPTION_KEYS = {
    "model": _MODEL,
    "prompt_key": "data.prompt_key",
    "reward_fn_key": "data.reward_fn_key",
    "ground_truth_key": "data.ground_truth_key",
}

_QUANTILES = (0.5, 0.9, 0.99, 1.0)
_BINS = 12
_BAR_WIDTH = 40
_MAX_ANSWER = 60  # characters
_COLORS = {"ok": "green", "warning": "yellow", "failed": "red"}


def main_data(arguments: Sequence[str] | None = None) -> int:
    """The command of the data check; returns its exit code."""
    try:
        options = _read_arguments("verl.utils.dataset.check", "Check data files.", arguments)
        tokenizer = None
        if options.model is not None:
            from verl.utils import hf_tokenizer
            from verl.utils.fs import resolve_model_path

            tokenizer = hf_tokenizer(resolve_model_path(options.model, key="--model"))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    data = options.config.data
    report = check_data(
        options.files,
        tokenizer=tokenizer,
        prompt_key=data.prompt_key,
        reward_fn_key=data.reward_fn_key,
        ground_truth_key=data.ground_truth_key,
        limits=options.limits,
        any_source=options.custom_reward,
        scored_rows=GROUND_TRUTHS_PER_SOURCE if options.n is None else options.n or sys.maxsize,
        samples=options.samples,
    )
    show_report(report)
    return int(report.failed)


def main_reward(arguments: Sequence[str] | None = None) -> int:
    """The command of the reward check; returns its exit code."""
    try:
        options = _read_arguments("verl.utils.reward_check", "Check a reward function.", arguments)
        rows = REWARD_ROWS if options.n is None else options.n or sys.maxsize
        report = check_reward_function(options.files, options.overrides, rows, options.seed)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    show_report(report)
    return int(report.failed)


@dataclass(frozen=True)
class _Arguments:
    """The parsed arguments of both commands."""

    files: list[str]
    overrides: list[str]
    config: PPOConfig
    limits: list[int]
    """Prompt lengths to compare with."""
    custom_reward: bool
    """A reward function of the user takes any data source."""
    n: int | None
    """Rows to score; None: the command's default, 0: all."""
    seed: int
    samples: int

    @property
    def model(self) -> str | None:
        path = self.config.actor_rollout_ref.model.path
        return None if path == NO_MODEL else path


def _read_arguments(program: str, description: str, arguments: Sequence[str] | None) -> _Arguments:
    """Parse the command line of one of the two commands. Raises ValueError (ConfigError) for invalid arguments."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    # Removed before argparse: options with several values would consume them.
    overrides = [word for word in words if _OVERRIDE.match(word)]
    options = _parser(program, description).parse_intermixed_args([word for word in words if word not in overrides])
    overrides += [f"{key}={getattr(options, name)}" for name, key in _OPTION_KEYS.items() if getattr(options, name)]
    files = options.files
    limits = options.max_prompt_length or []
    if limits:
        overrides.append(f"data.max_prompt_length={max(limits)}")
    base = {"data": {"train_files": files}, "actor_rollout_ref": {"model": {"path": NO_MODEL}}}
    if not files and not any(word.lstrip("+").startswith(f"{_FILES}=") for word in overrides):
        raise ValueError(f"no data file is given. Write: python -m {program} FILE [key=value …]")
    config = load_config(base, overrides, check_files=False)
    return _Arguments(
        files=files or config.data.train_files,
        overrides=overrides,
        config=config,
        limits=limits or [config.data.max_prompt_length],
        custom_reward=options.custom_reward or config.custom_reward_function.path is not None,
        n=options.n,
        seed=options.seed,
        samples=options.samples,
    )


def _parser(program: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument(
        "files",
        nargs="*",
        help="parquet, arrow, json or jsonl files, folders or hub names; and keys of the run (key=value)",
    )
    parser.add_argument("--model", help=f"tokenizer to count prompt tokens with; {_MODEL}")
    for name in ("prompt", "reward-fn", "ground-truth"):
        parser.add_argument(f"--{name}-key", help=f"data.{name.replace('-', '_')}_key")
    parser.add_argument(
        "--max-prompt-length", type=int, nargs="+", help="limits to compare with; data.max_prompt_length"
    )
    parser.add_argument("--custom-reward", action="store_true", help="a reward function of yours takes any data_source")
    parser.add_argument("--n", "--score-rows", type=int, help="rows to score (dataset.check: per data source); 0: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of rows (reward_check)")
    parser.add_argument("--samples", type=int, default=2, help="rows to print (dataset.check)")
    return parser


def show_report(report: CheckReport, console: Console | None = None) -> None:
    """Print everything that was checked, with the verdict last."""
    console = console or Console(highlight=False)
    if report.reward is not None:
        _show_reward(report.reward, console)
        return
    if not console.is_terminal:
        console.width = max(console.width, 120)
    for file, rows in report.files:
        console.print(f"{escape(file)}: {rows} rows", soft_wrap=True)
    if report.columns:
        console.print(_column_table(report.columns))
    for sample in report.samples:
        console.print(_sample_panel(sample))
    if report.lengths is not None and len(report.lengths.values):
        console.print(_histogram(report.lengths))
    if report.sources:
        console.print(_source_table(report.sources))
    for notice in report.notices:
        console.print(f"[yellow]note:[/yellow] {escape(notice)}", soft_wrap=True)
    for number, problem in enumerate(report.problems, start=1):
        console.print(f"[red]{number}.[/red] {escape(problem)}", soft_wrap=True)
    count = len(report.problems)
    plural = "s" if count != 1 else ""
    console.print(
        f"[bold red]{count} problem{plural}[/]" if count else "[bold green]ok[/]: these files can be used for training"
    )


def _show_reward(report: RewardReport, console: Console) -> None:
    if report.samples:
        scores = Table("answer", "text", "ground truth", "score")
        for sample in report.samples:
            text, truth = (repr(str(value))[:_MAX_ANSWER] for value in (sample.answer, sample.ground_truth))
            scores.add_row(sample.kind, escape(text), escape(truth), f"{sample.score:g}")
        console.print(scores)
    table = Table("question", "answer", "verdict")
    for finding in report.findings:
        color = _COLORS[finding.verdict]
        table.add_row(finding.question, escape(finding.answer), f"[{color}]{finding.verdict}[/{color}]")
    console.print(table)
    if report.fatal_error is not None:
        console.print(escape(f"no answer could be scored. The first error:\n{report.fatal_error}"), soft_wrap=True)
    if report.failed:
        console.print("failed: do not train with this reward")
    elif report.right_answers_verified:
        console.print("ok: this reward distinguishes right from wrong")
    else:
        console.print("not verified: none of the tried answers was scored as correct", soft_wrap=True)


def _column_table(columns: list[DataColumn]) -> Table:
    table = Table("column", "type", "null", title="columns", title_justify="left")
    for column in columns:
        nulls = f"[yellow]{column.nulls}[/]" if column.nulls else "0"
        table.add_row(escape(column.name), escape(" or ".join(column.types)), nulls)
    return table


def _sample_panel(sample: SampleRow) -> Panel:
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
    edges = _bin_edges(values)
    # The last bin includes all longer prompts.
    counts = np.bincount(np.minimum(np.digitize(values, edges) - 1, len(edges) - 1), minlength=len(edges))
    for number, count in enumerate(counts.tolist()):
        last = number == len(edges) - 1
        label = f"{edges[number]}+" if last else f"{edges[number]}-{edges[number + 1] - 1}"
        over = any(edges[number] > limit for limit in lengths.limits[-1:])
        bar = Bar(int(counts.max()), 0, count, width=_BAR_WIDTH, color="red" if over else "blue")
        table.add_row(label, bar, str(count), f"{count / len(values):.1%}")
    return Group(f"[italic]prompt {lengths.unit}: {quantiles}{shares}[/]", table)


def _bin_edges(values: np.ndarray) -> np.ndarray:
    """Return about a dozen round numbers from the shortest prompt to the 99 % quantile, where bins begin."""
    low, high = int(values.min()), int(np.quantile(values, 0.99))
    rough = max(1.0, (high - low) / _BINS)
    power = 10 ** int(np.floor(np.log10(rough)))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return np.arange(low // step * step, high + 1, step)


def _source_table(sources: dict[str, SourceReward]) -> Table:
    table = Table("data_source", "rows", "reward function", "ground truths that score 1.0", title="rewards")
    table.title_justify = "left"
    for name, source in sorted(sources.items()):
        color = "red" if source.correct < source.tried else "green"
        correct = f"[{color}]{source.correct}/{source.tried}[/]" if source.tried else "-"
        table.add_row(escape(name), str(source.rows), source.function or "[red]none[/]", correct)
    return table
