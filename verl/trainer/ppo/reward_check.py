"""The reward check as a command and at the start of a run: which rows and which reward manager, then a verdict.

`python -m verl.utils.reward_check FILE… [--n 64] [key=value …]`. Exit code 0: the reward can be trusted; 1: it cannot.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import random
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from verl.config.load import load_config
from verl.trainer.ppo.reward import load_reward_manager
from verl.utils.dataset.files import find_files
from verl.utils.dataset.problems import ground_truth_of, is_scored_by_agent
from verl.utils.dataset.rows import Rows
from verl.utils.reward_score import default_compute_score, known_data_sources
from verl.utils.reward_score.registry import matching, unknown_source
from verl.workers.reward_manager.check import RewardReport, Row, check_reward

logger = logging.getLogger(__name__)

_OVERRIDE = re.compile(r"\+{0,2}[A-Za-z_]\w*(\.[\w-]+)*=")
_START_ROWS = 8
_START_SECONDS = 1.5
_COLORS = {"ok": "green", "warning": "yellow", "failed": "red"}


def check_files(data_files: Sequence[str], overrides: Sequence[str] = (), n: int = 64, seed: int = 0) -> RewardReport:
    """Check the reward function that a run with these `key=value` overrides would use, on `n` rows of the files."""
    config = load_config(
        {"data": {"train_files": list(data_files)}, "actor_rollout_ref": {"model": {"path": "unused"}}},
        overrides,
        check_files=False,
    )
    for module in config.external_libs:
        importlib.import_module(module)
    rows = _sampled(Rows(find_files(data_files)), config.data.reward_fn_key, n, seed)
    manager = load_reward_manager(config, tokenizer=None, num_examine=0)
    try:
        own_function = manager.compute_score is not default_compute_score
        _refuse_unknown(rows, own_function)
        return check_reward(manager.submit, rows, own_function=own_function)
    finally:
        manager.close()


def check_at_start(manager: Any, dataset: Any, reward_fn_key: str) -> None:
    """A quick check on a few rows before training: doubts go to the log; an error if no sample can be scored at all."""
    compute_score = getattr(manager, "compute_score", None)
    if not hasattr(manager, "submit") or compute_score is None or not len(dataset):
        return
    count = min(_START_ROWS, len(dataset))
    chosen = [dataset[index * len(dataset) // count] for index in range(count)]
    rows = [_row(row, reward_fn_key) for row in chosen if not is_scored_by_agent(row)]
    if not rows:
        return
    own_function = compute_score is not default_compute_score
    _refuse_unknown(rows, own_function)
    report = check_reward(manager.submit, rows, own_function=own_function, budget_seconds=_START_SECONDS, quick=True)
    if report.hopeless is not None:
        manager.close()
        raise ValueError(
            f"custom_reward_function: no answer to {len(rows)} rows could be scored, whatever it was."
            f" The first error:\n{report.hopeless}\nTry it alone: python -m verl.utils.reward_check FILE."
        )
    sound = [f"{finding.question}: {finding.answer}" for finding in report.findings if finding.verdict == "ok"]
    logger.info("reward check, %d rows: %s", len(rows), "; ".join(sound))
    for finding in report.findings:
        if finding.verdict != "ok":
            logger.warning("reward check: %s: %s. Train on if that is meant.", finding.question, finding.answer)


def show(report: RewardReport) -> None:
    """The report as a table on the terminal."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    table = Table("question", "answer", "verdict")
    for finding in report.findings:
        color = _COLORS[finding.verdict]
        table.add_row(finding.question, escape(finding.answer), f"[{color}]{finding.verdict}[/{color}]")
    console.print(table)
    if report.hopeless is not None:
        console.print(escape(f"no answer could be scored. The first error:\n{report.hopeless}"), soft_wrap=True)
    console.print("not to be trusted" if report.failed else "ok: this reward tells right from wrong")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verl.utils.reward_check", description="Check a reward function.")
    parser.add_argument("files", nargs="+", help="data files or folders, then overrides of the run (key=value)")
    parser.add_argument("--n", type=int, default=64, help="rows to try, spread over data sources")
    parser.add_argument("--seed", type=int, default=0, help="which rows")
    options = parser.parse_intermixed_args(arguments)
    overrides = [text for text in options.files if _OVERRIDE.match(text)]
    files = [text for text in options.files if text not in overrides]
    try:
        if not files:
            raise ValueError("no data file is given. Write: python -m verl.utils.reward_check FILE [key=value …]")
        report = check_files(files, overrides, options.n, options.seed)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    show(report)
    return 1 if report.failed else 0


def _sampled(rows: Rows, key: str, n: int, seed: int) -> list[Row]:
    """Random rows, as many of every data source as there are, up to `n` in all."""
    places: dict[Any, list[int]] = defaultdict(list)
    for first, batch in rows.batches([key]):
        for number, row in enumerate(batch, start=first):
            places[row.get(key)].append(number)
    order = random.Random(seed)
    for numbers in places.values():
        order.shuffle(numbers)
    by_turns = [numbers[turn] for turn in range(n) for numbers in places.values() if turn < len(numbers)]
    return [_row(rows[number], key) for number in by_turns[:n]]


def _row(row: Mapping[str, Any], key: str) -> Row:
    if key not in row:
        raise ValueError(f"data.reward_fn_key: rows have no {key!r} (found: {', '.join(row)}). Set it to the column.")
    return Row(row[key], ground_truth_of(dict(row)), dict(row.get("extra_info") or {}))


def _refuse_unknown(rows: Sequence[Row], own_function: bool) -> None:
    known = known_data_sources()
    for row in rows:
        if not own_function and matching(str(row.data_source), known) is None:
            raise ValueError(unknown_source(str(row.data_source), known))
