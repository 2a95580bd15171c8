"""`python -m verl.utils.dataset.check FILE… [key=value …]`: would these files train? Schema, lengths, reward wiring.

Exit code 0: yes; 1: no, with every problem and its remedy. Token counts are kept: the training that follows on the
same files and model need not tokenise them again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from verl.utils.dataset.chat import Messages, PromptEncoder, PromptRejected, as_messages, prompt_digest
from verl.utils.dataset.check_arguments import read_arguments
from verl.utils.dataset.check_report import AGENT, JUDGED, DataColumn, DataReport, PromptLengths, ShownRow, Wiring, show
from verl.utils.dataset.files import find_files
from verl.utils.dataset.problems import (
    GROUND_TRUTH,
    DataError,
    chat_rule,
    data_source_rules,
    find_problems,
    ground_truth_of,
    ground_truth_rule,
    is_scored_by_agent,
    uses_reward_model,
)
from verl.utils.dataset.rows import ArrowPart, Part, Rows, open_part, value_at
from verl.utils.reward_score import known_data_sources, score_function
from verl.utils.reward_score.registry import matching
from verl.utils.reward_score.trial import try_ground_truth

_SHOWN_CHARACTERS = 700
_SCORED_ROWS = 20_000


def check_files(
    data_files: str | Sequence[str],
    *,
    tokenizer: Any = None,
    prompt_key: str = "prompt",
    reward_fn_key: str = "data_source",
    ground_truth_key: str = GROUND_TRUTH,
    limits: Sequence[int] = (),
    any_source: bool = False,
    scored_rows: int = _SCORED_ROWS,
    samples: int = 2,
) -> DataReport:
    """Look at every row.

    Prompts are counted in tokens of `tokenizer`, else in characters, and compared with `limits`. `any_source`: a reward
    function of the user takes any data source. Of every source, `scored_rows` ground truths, evenly spread, are scored
    against themselves.
    """
    report = DataReport()
    rows = Rows(_readable(data_files, report.problems))
    report.files = [(part.file, len(part)) for part in rows.parts]
    report.columns = _columns(rows)
    rules = [chat_rule(prompt_key, "data.prompt_key")]
    if not any_source:
        rules += data_source_rules(reward_fn_key, known_data_sources(), exempt_reward_model=True)
    truth = ground_truth_rule(ground_truth_key)
    if any_source:  # a function of the user may do without
        report.notices += find_problems(rows, [truth])
    else:
        rules.append(truth)
    prompts_are_sound = not find_problems(rows, rules[:1])
    report.problems += find_problems(rows, rules)
    report.wiring = _wiring(rows, reward_fn_key, ground_truth_key, scored_rows)
    report.notices += [
        f"rows of {source} are for a reward model: set reward_model.enable=True and reward_model.path, or"
        " custom_reward_function.path."
        for source, wiring in report.wiring.items()
        if wiring.function is JUDGED and not any_source
    ]
    report.problems += [problem for wiring in report.wiring.values() if (problem := wiring.problem()) is not None]
    if prompts_are_sound and len(rows):
        encoder = None if tokenizer is None else PromptEncoder(tokenizer, {})
        _look_for_repetitions(rows, prompt_key, ground_truth_key, report)
        _measure(rows, prompt_key, encoder, limits, report)
        report.samples = list(_samples(rows, prompt_key, encoder, samples))
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options = read_arguments("verl.utils.dataset.check", "Check data files.", arguments)
        tokenizer = None
        if options.model is not None:
            from verl.utils import hf_tokenizer
            from verl.utils.fs import resolve_model_path

            tokenizer = hf_tokenizer(resolve_model_path(options.model, key="--model"))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    data = options.config.data
    report = check_files(
        options.files,
        tokenizer=tokenizer,
        prompt_key=data.prompt_key,
        reward_fn_key=data.reward_fn_key,
        ground_truth_key=data.ground_truth_key,
        limits=options.limits,
        any_source=options.custom_reward,
        scored_rows=_SCORED_ROWS if options.n is None else options.n or sys.maxsize,
        samples=options.samples,
    )
    show(report)
    return 1 if report.problems else 0


def _readable(data_files: str | Sequence[str], problems: list[str]) -> Iterator[Part]:
    """Every file that can be opened; the others are problems."""
    for name in [data_files] if isinstance(data_files, str | os.PathLike) else data_files:
        try:
            files = find_files(name)
        except ValueError as error:
            problems.append(str(error))
            continue
        for file in files:
            try:
                yield open_part(file)
            except (ValueError, OSError) as error:
                problems.append(str(error))


def _columns(rows: Rows) -> list[DataColumn]:
    found: dict[str, DataColumn] = {}
    for part in rows.parts:
        for name in part.columns:
            column = found.setdefault(name, DataColumn(name))
            if isinstance(part, ArrowPart):
                column.types.setdefault(str(part.table.schema.field(name).type))
                column.nulls += part.table.column(name).null_count
            else:
                column.types.setdefault("json")
    return list(found.values())


def _wiring(rows: Rows, key: str, truth_key: str, scored_rows: int) -> dict[str, Wiring]:
    """Per data source: is there a function, and do right answers in the right format score 1.0?"""
    places: dict[str, list[int]] = {}
    for first, batch in rows.batches([key]):
        for number, row in enumerate(batch, start=first):
            if isinstance(row.get(key), str):
                places.setdefault(row[key], []).append(number)
    found, chosen = {}, np.zeros(len(rows), dtype=bool)
    for source, numbers in places.items():
        row = rows[numbers[0]]
        task = JUDGED if uses_reward_model(row) else AGENT if is_scored_by_agent(row) else None
        if matching(source, known_data_sources()) is not None:
            task = score_function(source).compute.__module__.rpartition(".")[2]
            spread = np.linspace(0, len(numbers) - 1, min(len(numbers), scored_rows)).astype(int)
            chosen[np.array(numbers)[spread]] = True
        found[source] = Wiring(len(numbers), task)
    for first, batch in rows.batches([key, "reward_model", truth_key.split(".")[0], "extra_info"]):
        for offset in np.flatnonzero(chosen[first : first + len(batch)]).tolist():
            source = batch[offset][key]
            truth = ground_truth_of(batch[offset], truth_key)
            _try(batch[offset], truth, source, rows.where(first + offset), found[source])
    return found


def _try(row: dict[str, Any], truth: Any, source: str, where: str, wiring: Wiring) -> None:
    trial = None if truth is None else try_ground_truth(source, truth, row.get("extra_info"))
    if trial is None:
        return
    wiring.tried += 1
    wiring.right += trial.problem is None
    if trial.problem is not None and wiring.first_wrong is None:
        wiring.first_wrong = f"{where}: the ground truth {str(truth)[:60]!r} {trial.problem}"


def _look_for_repetitions(rows: Rows, prompt_key: str, truth_key: str, report: DataReport) -> None:
    """Prompts that come again: in the same file, in another one, or with another ground truth."""
    seen: dict[bytes, tuple[int, Any]] = {}
    again: list[tuple[int, int]] = []
    elsewhere: list[tuple[int, int]] = []
    contradictions: list[tuple[int, int]] = []
    for first, batch in rows.batches([prompt_key.split(".")[0], "reward_model", truth_key.split(".")[0]]):
        for number, row in enumerate(batch, start=first):
            prompt, truth = prompt_digest(as_messages(value_at(row, prompt_key))), ground_truth_of(row, truth_key)
            earlier, its_truth = seen.setdefault(prompt, (number, truth))
            if earlier != number:
                pair = (number, earlier)
                (again if rows.part_of(earlier) is rows.part_of(number) else elsewhere).append(pair)
                if its_truth != truth:
                    contradictions.append(pair)
    for pairs, what in (
        (again, "repeat an earlier one of the same file"),
        (elsewhere, "stand in two files: if one is to validate on, its scores mean less"),
        (contradictions, "repeat an earlier one with another ground truth: one of them is wrong"),
    ):
        if pairs:
            number, earlier = pairs[0]
            place = f"e.g. {rows.where(number)} and {rows.where(earlier)}"
            report.notices.append(f"{len(pairs)} of {len(rows)} prompts {what} ({place}).")


def _measure(
    rows: Rows, prompt_key: str, encoder: PromptEncoder | None, limits: Sequence[int], report: DataReport
) -> None:
    if encoder is None:
        texts = (value_at(row, prompt_key) for _, batch in rows.batches([prompt_key.split(".")[0]]) for row in batch)
        values = np.array([sum(len(str(message.get("content"))) for message in as_messages(text)) for text in texts])
        report.lengths = PromptLengths(values, "characters", [])
        return
    from verl.utils.dataset.tokens import encode_prompts  # it needs torch, which takes its time

    try:
        values = encode_prompts(rows, len(rows), prompt_key, encoder).tokens.lengths
    except DataError as error:
        report.problems += error.problems
        return
    report.lengths = PromptLengths(values, "tokens", sorted(limits))
    for limit in sorted(limits):
        over = int((values > limit).sum())
        if over:
            report.notices.append(
                f"{over} prompts ({over / len(values):.1%}) have more than {limit} tokens: with"
                f" data.max_prompt_length = {limit}, data.filter_overlong_prompts drops them."
            )


def _samples(rows: Rows, prompt_key: str, encoder: PromptEncoder | None, count: int) -> Iterator[ShownRow]:
    """The first row and others, evenly spread; the prompt as the model will see it where that is known."""
    for number in np.unique(np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int)).tolist():
        row = rows[number]
        messages = as_messages(value_at(row, prompt_key))
        fields = {name: str(value)[:_SHOWN_CHARACTERS] for name, value in row.items() if name != prompt_key}
        yield ShownRow(rows.where(number), _shown(messages, encoder)[:_SHOWN_CHARACTERS], fields)


def _shown(messages: Messages, encoder: PromptEncoder | None) -> str:
    if encoder is not None:
        try:
            (text,) = encoder.render([messages])
        except PromptRejected as error:
            return str(error)
        return str(text)
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in messages)


if __name__ == "__main__":
    sys.exit(main())
