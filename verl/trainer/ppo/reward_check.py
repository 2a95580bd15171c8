"""The reward check as a command and at the start of a run: which rows and which reward manager, then a verdict.

`python -m verl.utils.reward_check FILE… [--n 64] [key=value …]`. Exit code 0: the reward can be trusted; 1: it cannot.
"""

from __future__ import annotations

import importlib
import logging
import random
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from verl.config.load import load_config
from verl.trainer.ppo.reward import load_reward_manager
from verl.utils.dataset.check_arguments import read_arguments
from verl.utils.dataset.files import find_files
from verl.utils.dataset.problems import GROUND_TRUTH, ground_truth_of, is_scored_by_agent
from verl.utils.dataset.rows import Rows, value_at
from verl.utils.reward_score import default_compute_score, known_data_sources
from verl.utils.reward_score.registry import UNKNOWN_SOURCE, matching, unknown_source
from verl.workers.reward_manager.check import RewardReport, Row, check_reward

logger = logging.getLogger(__name__)

_ROWS = 64
_START_ROWS = 8
_START_SECONDS = 1.5
_COLORS = {"ok": "green", "warning": "yellow", "failed": "red"}


def check_files(
    data_files: Sequence[str], overrides: Sequence[str] = (), n: int = _ROWS, seed: int = 0
) -> RewardReport:
    """Check the reward function that a run with these `key=value` overrides would use, on `n` rows of the files."""
    config = load_config(
        {"data": {"train_files": list(data_files)}, "actor_rollout_ref": {"model": {"path": "unused"}}},
        overrides,
        check_files=False,
    )
    for module in config.external_libs:
        importlib.import_module(module)
    manager = load_reward_manager(config, tokenizer=None, num_examine=0)
    try:
        own_function = manager.compute_score is not default_compute_score
        data = config.data
        chosen = _sampled(Rows(find_files(data_files)), data.reward_fn_key, n, seed)
        rows = [_row(row, data.reward_fn_key, own_function, data.ground_truth_key) for row in chosen]
        _refuse_unknown(rows, own_function)
        return check_reward(manager.submit, rows, own_function=own_function)
    finally:
        manager.close()


def check_at_start(manager: Any, dataset: Any, reward_fn_key: str, default_loop: str | None = None) -> None:
    """A quick check on a few rows before training: doubts go to the log; an error if no sample can be scored at all.

    `default_loop`: the agent loop of rows without `agent_name`; a loop of the user may return the score itself.
    """
    compute_score = getattr(manager, "compute_score", None)
    if not hasattr(manager, "submit") or compute_score is None or not len(dataset):
        return
    count = min(_START_ROWS, len(dataset))
    chosen = [dataset[index * len(dataset) // count] for index in range(count)]
    own_function = compute_score is not default_compute_score
    rows = [_row(row, reward_fn_key, own_function) for row in chosen if not is_scored_by_agent(row, default_loop)]
    if not rows:
        return
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
    try:
        options = read_arguments("verl.utils.reward_check", "Check a reward function.", arguments)
        rows = _ROWS if options.n is None else options.n or sys.maxsize
        report = check_files(options.files, options.overrides, rows, options.seed)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    show(report)
    return 1 if report.failed else 0


def _sampled(rows: Rows, key: str, n: int, seed: int) -> list[dict[str, Any]]:
    """Random rows, as many of every data source as there are, up to `n` in all."""
    places: dict[Any, list[int]] = defaultdict(list)
    for first, batch in rows.batches([key.split(".")[0]]):
        for number, row in enumerate(batch, start=first):
            places[value_at(row, key)].append(number)
    order = random.Random(seed)
    for numbers in places.values():
        order.shuffle(numbers)
    turns = min(n, max(map(len, places.values()), default=0))
    by_turns = [numbers[turn] for turn in range(turns) for numbers in places.values() if turn < len(numbers)]
    return [rows[number] for number in by_turns[:n]]


def _row(row: Mapping[str, Any], key: str, own_function: bool, truth_key: str = GROUND_TRUTH) -> Row:
    source = value_at(row, key) if row.get(key) is None else row[key]
    if source is None and not own_function:
        raise ValueError(
            f"data.reward_fn_key: rows have no {key!r}. Set it to the column that names the data source, or set "
            f"custom_reward_function.path. Columns: {', '.join(row)}."
        )
    return Row(source or UNKNOWN_SOURCE, ground_truth_of(row, truth_key), dict(row.get("extra_info") or {}))


def _refuse_unknown(rows: Sequence[Row], own_function: bool) -> None:
    known = known_data_sources()
    for row in rows:
        if not own_function and matching(str(row.data_source), known) is None:
            raise ValueError(unknown_source(str(row.data_source), known))
