"""`python -m verl.utils.dataset.check FILE… [--model PATH]`: would these files train? Schema, lengths, reward wiring.

Exit code 0: yes; 1: no, with every problem and its remedy.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl.utils.dataset.chat import PromptEncoder, as_messages
from verl.utils.dataset.files import find_files
from verl.utils.dataset.problems import (
    chat_rule,
    find_problems,
    ground_truth_of,
    ground_truth_rule,
    source_rule,
    text_rule,
)
from verl.utils.dataset.rows import ArrowPart, Rows
from verl.utils.reward_score import known_data_sources, score_function

_QUANTILES = (0.5, 0.9, 0.99, 1.0)


@dataclass
class Wiring:
    """How the rewards of one data source are connected."""

    rows: int = 0
    by_rule: int = 0  # rows with a ground truth to compare with
    tried: int = 0  # of these, ground truths given as the answer, in the right format
    right: int = 0  # and scored 1.0
    first_wrong: str | None = None


@dataclass
class Report:
    """What was found; `problems` is empty for files that train."""

    files: list[str]
    rows: int
    columns: list[str]
    first: dict[str, Any] | None
    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    wiring: dict[str, Wiring] = field(default_factory=dict)
    lengths: np.ndarray | None = None


def check_files(
    data_files: str | Sequence[str],
    *,
    tokenizer: Any = None,
    prompt_key: str = "prompt",
    reward_fn_key: str = "data_source",
    max_prompt_length: int | None = None,
    any_source: bool = False,
) -> Report:
    """Look at every row. `any_source`: a reward function of the user takes any data source."""
    rows = Rows(find_files(data_files))
    report = Report([part.file for part in rows.parts], len(rows), _described_columns(rows), rows[0] if rows else None)
    rules = [
        chat_rule(prompt_key, rows.columns, "data.prompt_key"),
        text_rule(reward_fn_key, rows.columns, "data.reward_fn_key"),
        ground_truth_rule(),
    ]
    if not any_source:
        rules.append(source_rule(reward_fn_key, known_data_sources()))
    report.problems = find_problems(rows, rules)
    report.wiring = _wiring(rows, reward_fn_key, report.problems)
    prompts_are_sound = not find_problems(rows, rules[:1])
    if prompts_are_sound:
        _look_for_duplicates(rows, prompt_key, report)
    if prompts_are_sound and tokenizer is not None:
        report.lengths = np.array([len(ids) for ids in _encoded(rows, prompt_key, tokenizer)])
        _compare_lengths(report, max_prompt_length)
    return report


def _described_columns(rows: Rows) -> list[str]:
    types: dict[str, str] = {}
    for part in rows.parts:
        for name in part.columns:
            if isinstance(part, ArrowPart):
                types.setdefault(name, str(part.table.schema.field(name).type))
            else:
                types.setdefault(name, "json")
    return [f"{name}: {kind}" for name, kind in types.items()]


def _wiring(rows: Rows, key: str, problems: list[str]) -> dict[str, Wiring]:
    """Per data source: is there a function, and do right answers in the right format score 1.0?"""
    found: dict[str, Wiring] = {}
    known = set(known_data_sources())
    for first, batch in rows.batches([key, "reward_model", "ground_truth", "extra_info"]):
        for number, row in enumerate(batch, start=first):
            source = row.get(key)
            if not isinstance(source, str):
                continue
            wiring = found.setdefault(source, Wiring())
            wiring.rows += 1
            truth = ground_truth_of(row)
            wiring.by_rule += truth is not None
            function = score_function(source) if source in known else None
            if truth is None or function is None or function.answer is None:
                continue
            wiring.tried += 1
            try:
                result = function(source, function.answer(truth), truth, row.get("extra_info"))
                score = float(result["score"] if isinstance(result, dict) else result)
                what = f"scores {score:g} against itself, not 1"
            except (ValueError, TypeError, KeyError, ArithmeticError) as error:
                score, what = 0.0, f"cannot be scored ({error})"
            wiring.right += score == 1.0
            if score != 1.0 and wiring.first_wrong is None:
                wiring.first_wrong = f"{rows.where(number)}: the ground truth {str(truth)[:60]!r} {what}"
    for wiring in found.values():
        if wiring.first_wrong is not None:
            wrong = wiring.tried - wiring.right
            problems.append(f"{wiring.first_wrong} ({wrong} such rows). Write it as its reward function expects.")
    return found


def _look_for_duplicates(rows: Rows, prompt_key: str, report: Report) -> None:
    prompts = Counter(str(row[prompt_key]) for _, batch in rows.batches([prompt_key]) for row in batch)
    repeated = sum(count - 1 for count in prompts.values())
    if repeated:
        report.notices.append(f"{repeated} of {len(rows)} prompts repeat an earlier one.")


def _encoded(rows: Rows, prompt_key: str, tokenizer: Any) -> Iterator[list[int]]:
    encoder = PromptEncoder(tokenizer, {})
    for _, batch in rows.batches([prompt_key]):
        yield from encoder.encode([as_messages(row[prompt_key]) for row in batch])


def _compare_lengths(report: Report, limit: int | None) -> None:
    assert report.lengths is not None
    if limit is None or not len(report.lengths):
        return
    over = int((report.lengths > limit).sum())
    if over:
        share = over / len(report.lengths)
        report.notices.append(
            f"{over} prompts ({share:.1%}) have more than {limit} tokens: data.filter_overlong_prompts drops them."
        )


def show(report: Report) -> None:
    """The report on the terminal."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    console.print(escape(f"{', '.join(report.files)}: {report.rows} rows"), soft_wrap=True)
    for column in report.columns:
        console.print(escape(f"  {column}"), soft_wrap=True)
    if report.first is not None:
        console.print("first row:")
        for name, value in report.first.items():
            console.print(escape(f"  {name}: {str(value)[:300]}"), soft_wrap=True)
    if report.lengths is not None and len(report.lengths):
        parts = [f"{q:.0%} ≤ {int(np.quantile(report.lengths, q))}" for q in _QUANTILES]
        console.print(f"prompt tokens: {', '.join(parts)}")
    if report.wiring:
        table = Table("data_source", "rows", "reward function", "ground truths that score 1.0")
        for source, wiring in sorted(report.wiring.items()):
            known = source in known_data_sources()
            name = score_function(source).compute.__module__.rpartition(".")[2] if known else "none"
            table.add_row(source, str(wiring.rows), name, f"{wiring.right}/{wiring.tried}" if wiring.tried else "-")
        console.print(table)
    for notice in report.notices:
        console.print(escape(f"note: {notice}"), soft_wrap=True)
    for number, problem in enumerate(report.problems, start=1):
        console.print(escape(f"{number}. {problem}"), soft_wrap=True)
    count = len(report.problems)
    console.print(f"{count} problem{'s' if count != 1 else ''}" if count else "ok: these files train")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verl.utils.dataset.check", description="Check data files.")
    parser.add_argument("files", nargs="+", help="parquet, arrow, json or jsonl files, or folders")
    parser.add_argument("--model", help="count tokens with the tokenizer of this model (folder or hub name)")
    parser.add_argument("--prompt-key", default="prompt")
    parser.add_argument("--reward-fn-key", default="data_source")
    parser.add_argument("--max-prompt-length", type=int, default=1024)
    parser.add_argument("--custom-reward", action="store_true", help="a reward function of yours takes any data_source")
    options = parser.parse_args(arguments)
    tokenizer = None
    try:
        if options.model:
            from verl.utils import hf_tokenizer

            tokenizer = hf_tokenizer(options.model)
        report = check_files(
            options.files,
            tokenizer=tokenizer,
            prompt_key=options.prompt_key,
            reward_fn_key=options.reward_fn_key,
            max_prompt_length=options.max_prompt_length,
            any_source=options.custom_reward,
        )
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    show(report)
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
