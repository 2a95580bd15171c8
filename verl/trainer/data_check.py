"""Check data files and reward functions before training.

`check_data`: can these files be trained on? Schema, prompt lengths, reward per data source. `check_reward_function`:
can this reward be trusted? The commands are in `data_check_command`. torch, and modules that import it, are imported
when they are needed.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.config import PPOConfig, load_config
from verl.utils.dataset.chat import Messages, PromptEncoder, PromptRejected, as_messages, prompt_digest
from verl.utils.dataset.problems import (
    DataError,
    chat_rule,
    data_source_rules,
    find_problems,
    ground_truth_rule,
    is_scored_by_agent,
    uses_reward_model,
)
from verl.utils.dataset.rows import (
    GROUND_TRUTH,
    ArrowFile,
    DataFile,
    Rows,
    find_files,
    ground_truth_of,
    open_data_file,
    value_at,
)
from verl.utils.reward_score import default_compute_score, known_data_sources, score_function
from verl.utils.reward_score.calls import check_ground_truth
from verl.utils.reward_score.registry import UNKNOWN_SOURCE, matching, unknown_source

if TYPE_CHECKING:
    from verl.workers.reward_manager.check import RewardReport, RewardRow

logger = logging.getLogger(__name__)

GROUND_TRUTHS_PER_SOURCE = 20_000
REWARD_ROWS = 64
NO_MODEL = "unused"
"""Model path in configurations of which only the data and reward keys are used."""
# How the rows of a data source without a reward function are scored.
REWARD_MODEL, AGENT, CUSTOM = "a reward model", "its agent", "custom"

_MAX_SAMPLE_CHARACTERS = 700
# Number of rows and time limit of the check before training.
_START_ROWS = 8
_START_SECONDS = 1.5


@dataclass
class DataColumn:
    """A column of the files. The keys of `types` are its types, in the order of the files."""

    name: str
    types: dict[str, None] = field(default_factory=dict)
    nulls: int = 0


@dataclass
class SourceReward:
    """How the rows of one data source are scored."""

    rows: int
    function: str | None
    """Module name of the reward function, REWARD_MODEL, AGENT or CUSTOM; None: the rows cannot be scored."""
    tried: int = 0
    """Number of ground truths that were scored as if they were the response, in the expected format."""
    correct: int = 0
    """Number of tried ground truths with a score of 1."""
    first_wrong: str | None = None
    """Description of the first tried ground truth with another score; None: all score 1."""

    def problem(self) -> str | None:
        """Return the problem of ground truths that do not score 1, if there are any."""
        if self.first_wrong is None:
            return None
        more = self.tried - self.correct - 1
        others = f" (and {more} more of the {self.tried} that were tried)" if more else ""
        return f"{self.first_wrong}{others}. Write it as its reward function expects."


@dataclass
class PromptLengths:
    """Lengths of the prompts [rows], their unit, and the limits to compare them with."""

    values: np.ndarray
    unit: str
    limits: list[int]


@dataclass
class SampleRow:
    """A row to print: its file and number, the prompt, the other fields."""

    where: str
    prompt: str
    fields: dict[str, str]


@dataclass
class CheckReport:
    """`problems` is empty for files that can be trained on; `reward` is None if only the data was checked."""

    files: list[tuple[str, int]] = field(default_factory=list)
    columns: list[DataColumn] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    sources: dict[str, SourceReward] = field(default_factory=dict)
    lengths: PromptLengths | None = None
    samples: list[SampleRow] = field(default_factory=list)
    reward: RewardReport | None = None

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.files)

    @property
    def failed(self) -> bool:
        return bool(self.problems) or (self.reward is not None and self.reward.failed)


# -------------------------------------------------------------------- data


def check_data(
    data_files: str | Sequence[str],
    *,
    tokenizer: Any = None,
    template_kwargs: Mapping[str, Any] | None = None,
    system_prompt: str | None = None,
    prompt_key: str = "prompt",
    reward_fn_key: str = "data_source",
    ground_truth_key: str = GROUND_TRUTH,
    limits: Sequence[int] = (),
    any_source: bool = False,
    scored_rows: int = GROUND_TRUTHS_PER_SOURCE,
    samples: int = 2,
) -> CheckReport:
    """Check every row of the files.

    `tokenizer`: counts prompt tokens, to compare them with `limits`; None: count characters. `template_kwargs`,
    `system_prompt`: as in `data.*`. `any_source`: a reward function of the user takes any data source. `scored_rows`:
    number of ground truths per source, evenly spread over the rows, to score as if they were the response. `samples`:
    number of rows to include in the report.
    """
    report = CheckReport()
    rows = Rows(_open_data_files(data_files, report.problems))
    report.files = [(data_file.file, len(data_file)) for data_file in rows.data_files]
    report.columns = _columns(rows)
    rules = [chat_rule(prompt_key, "data.prompt_key")]
    if not any_source:
        rules += data_source_rules(reward_fn_key, known_data_sources(), exempt_reward_model=True)
    truth = ground_truth_rule(ground_truth_key)
    if any_source:  # a user's function may not need one
        report.notices += find_problems(rows, [truth])
    else:
        rules.append(truth)
    prompts_are_valid = not find_problems(rows, rules[:1])
    report.problems += find_problems(rows, rules)
    report.sources = _source_rewards(rows, reward_fn_key, ground_truth_key, scored_rows)
    if any_source:
        for source in report.sources.values():
            source.function = source.function or CUSTOM
    report.notices += [
        f"rows of {name} are for a reward model: set reward_model.enable=True and reward_model.path, or"
        " custom_reward_function.path."
        for name, source in report.sources.items()
        if source.function is REWARD_MODEL and not any_source
    ]
    report.problems += [problem for source in report.sources.values() if (problem := source.problem()) is not None]
    if prompts_are_valid and len(rows):
        encoder = None
        if tokenizer is not None:
            encoder = PromptEncoder(tokenizer, template_kwargs or {}, system_prompt=system_prompt)
        report.notices += _find_repetitions(rows, prompt_key, ground_truth_key)
        _measure_prompts(rows, prompt_key, encoder, limits, report)
        report.samples = list(_samples(rows, prompt_key, encoder, samples))
    return report


def _open_data_files(data_files: str | Sequence[str], problems: list[str]) -> Iterator[DataFile]:
    """Yield every file that can be opened; add the others to `problems`."""
    for name in [data_files] if isinstance(data_files, str | os.PathLike) else data_files:
        try:
            files = find_files(name)
        except ValueError as error:
            problems.append(str(error))
            continue
        for file in files:
            try:
                yield open_data_file(file)
            except (ValueError, OSError) as error:
                problems.append(str(error))


def _columns(rows: Rows) -> list[DataColumn]:
    columns: dict[str, DataColumn] = {}
    for data_file in rows.data_files:
        for name in data_file.columns:
            column = columns.setdefault(name, DataColumn(name))
            if isinstance(data_file, ArrowFile):
                column.types.setdefault(str(data_file.table.schema.field(name).type))
                column.nulls += data_file.table.column(name).null_count
            else:
                column.types.setdefault("json")
    return list(columns.values())


def _source_rewards(rows: Rows, key: str, truth_key: str, scored_rows: int) -> dict[str, SourceReward]:
    """Return per data source the function that scores it, and how many of its ground truths score 1."""
    by_source = {source: numbers for source, numbers in _rows_by_source(rows, key).items() if isinstance(source, str)}
    sources, chosen = {}, np.zeros(len(rows), dtype=bool)
    for name, numbers in by_source.items():
        row = rows[numbers[0]]
        function = REWARD_MODEL if uses_reward_model(row) else AGENT if is_scored_by_agent(row) else None
        if matching(name, known_data_sources()) is not None:
            function = Path(inspect.getfile(score_function(name).compute)).stem
            spread = np.linspace(0, len(numbers) - 1, min(len(numbers), scored_rows)).astype(int)
            chosen[np.array(numbers)[spread]] = True
        sources[name] = SourceReward(len(numbers), function)
    for first, batch in rows.batches([key.split(".")[0], "reward_model", truth_key.split(".")[0], "extra_info"]):
        for offset in np.flatnonzero(chosen[first : first + len(batch)]).tolist():
            row, source = batch[offset], value_at(batch[offset], key)
            truth = ground_truth_of(row, truth_key)
            _score_ground_truth(row, truth, source, rows.where(first + offset), sources[source])
    return sources


def _rows_by_source(rows: Rows, key: str) -> dict[Any, list[int]]:
    """Return the row numbers of every value of the column `key` (which may be nested: `a.b`)."""
    by_value: dict[Any, list[int]] = defaultdict(list)
    for first, batch in rows.batches([key.split(".")[0]]):
        for number, row in enumerate(batch, start=first):
            by_value[value_at(row, key)].append(number)
    return by_value


def _score_ground_truth(row: dict[str, Any], truth: Any, source: str, where: str, result: SourceReward) -> None:
    check = None if truth is None else check_ground_truth(source, truth, row.get("extra_info"))
    if check is None:
        return
    result.tried += 1
    result.correct += check.problem is None
    if check.problem is not None and result.first_wrong is None:
        result.first_wrong = f"{where}: the ground truth {str(truth)[:60]!r} {check.problem}"


def _find_repetitions(rows: Rows, prompt_key: str, truth_key: str) -> Iterator[str]:
    """Yield notices about prompts that occur again: in the same file, in another one, or with another ground truth."""
    seen: dict[bytes, tuple[int, Any]] = {}
    same_file: list[tuple[int, int]] = []
    other_file: list[tuple[int, int]] = []
    contradictions: list[tuple[int, int]] = []
    for first, batch in rows.batches([prompt_key.split(".")[0], "reward_model", truth_key.split(".")[0]]):
        for number, row in enumerate(batch, start=first):
            prompt, truth = prompt_digest(as_messages(value_at(row, prompt_key))), ground_truth_of(row, truth_key)
            earlier, earlier_truth = seen.setdefault(prompt, (number, truth))
            if earlier != number:
                pair = (number, earlier)
                (same_file if rows.file_of(earlier) is rows.file_of(number) else other_file).append(pair)
                if earlier_truth != truth:
                    contradictions.append(pair)
    for pairs, what in (
        (same_file, "repeat an earlier one of the same file"),
        (other_file, "are in two files: if one of them is for validation, its scores are biased"),
        (contradictions, "repeat an earlier one with another ground truth: one of them is wrong"),
    ):
        if pairs:
            number, earlier = pairs[0]
            place = f"e.g. {rows.where(number)} and {rows.where(earlier)}"
            yield f"{len(pairs)} of {len(rows)} prompts {what} ({place})."


def _measure_prompts(
    rows: Rows, prompt_key: str, encoder: PromptEncoder | None, limits: Sequence[int], report: CheckReport
) -> None:
    """Add the prompt lengths, and notices about prompts over the limits, to the report."""
    if encoder is None:
        texts = (value_at(row, prompt_key) for _, batch in rows.batches([prompt_key.split(".")[0]]) for row in batch)
        values = np.array([sum(len(str(message.get("content"))) for message in as_messages(text)) for text in texts])
        report.lengths = PromptLengths(values, "characters", [])
        return
    from verl.utils.dataset.tokens import encode_prompts  # imports torch, which takes seconds

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


def _samples(rows: Rows, prompt_key: str, encoder: PromptEncoder | None, count: int) -> Iterator[SampleRow]:
    """Yield evenly spread rows, beginning with the first. `encoder`: applies the chat template to prompts."""
    for number in np.unique(np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int)).tolist():
        row = rows[number]
        messages = as_messages(value_at(row, prompt_key))
        fields = {name: str(value)[:_MAX_SAMPLE_CHARACTERS] for name, value in row.items() if name != prompt_key}
        yield SampleRow(rows.where(number), _prompt_text(messages, encoder)[:_MAX_SAMPLE_CHARACTERS], fields)


def _prompt_text(messages: Messages, encoder: PromptEncoder | None) -> str:
    if encoder is not None:
        try:
            (text,) = encoder.render([messages])
        except PromptRejected as error:
            return str(error)
        return str(text)
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in messages)


# -------------------------------------------------------------------- rewards


def check_reward_function(
    data_files: Sequence[str],
    overrides: Sequence[str] = (),
    n: int = REWARD_ROWS,
    seed: int = 0,
    config: PPOConfig | None = None,
) -> CheckReport:
    """Check the reward function that a run would use, on `n` rows of the files.

    The run is given by `key=value` overrides, or by its `config`.
    """
    from verl.trainer.ppo.reward import load_reward_manager
    from verl.workers.reward_manager.check import check_reward

    if config is None:
        base = {"data": {"train_files": list(data_files)}, "actor_rollout_ref": {"model": {"path": NO_MODEL}}}
        config = load_config(base, overrides, check_files=False)
    for module in config.external_libs:
        importlib.import_module(module)
    manager = load_reward_manager(config, tokenizer=None, num_examine=0)
    try:
        own_function = manager.compute_score is not default_compute_score
        data = config.data
        chosen = _sample_rows(Rows(find_files(data_files)), data.reward_fn_key, n, seed)
        rows = [_reward_row(row, data.reward_fn_key, own_function, data.ground_truth_key) for row in chosen]
        _check_sources(rows, own_function)
        return CheckReport(reward=check_reward(manager.submit, rows, is_user_function=own_function))
    finally:
        manager.close()


def check_reward_at_start(manager: Any, dataset: Any, reward_fn_key: str, default_loop: str | None = None) -> None:
    """Check the reward on a few rows before training: log findings, and raise ValueError if no sample can be scored.

    `default_loop`: the agent loop of rows without `agent_name`. Rows whose agent loop may return the score are skipped.
    """
    from verl.workers.reward_manager.check import check_reward

    compute_score = getattr(manager, "compute_score", None)
    if not hasattr(manager, "submit") or compute_score is None or not len(dataset):
        return
    count = min(_START_ROWS, len(dataset))
    chosen = [dataset[index * len(dataset) // count] for index in range(count)]
    own_function = compute_score is not default_compute_score
    scored = [row for row in chosen if not is_scored_by_agent(row, default_loop)]
    rows = [_reward_row(row, reward_fn_key, own_function) for row in scored]
    if not rows:
        return
    _check_sources(rows, own_function)
    report = check_reward(
        manager.submit, rows, is_user_function=own_function, budget_seconds=_START_SECONDS, quick=True
    )
    if report.fatal_error is not None:
        manager.close()
        scorer = "custom_reward_function" if own_function else "built-in reward function"
        raise ValueError(
            f"{scorer}: none of the responses to {len(rows)} rows could be scored."
            f" The first error:\n{report.fatal_error}\nTest the function separately:"
            " python -m verl.utils.reward_check FILE."
        )
    passed = [f"{finding.question}: {finding.answer}" for finding in report.findings if finding.verdict == "ok"]
    logger.info("reward check, %d rows: %s", len(rows), "; ".join(passed))
    for finding in report.findings:
        if finding.verdict != "ok":
            logger.warning("reward check: %s: %s. Ignore this if intended.", finding.question, finding.answer)


def _sample_rows(rows: Rows, key: str, n: int, seed: int) -> list[dict[str, Any]]:
    """Return up to `n` random rows, from all data sources in turn."""
    by_source = _rows_by_source(rows, key)
    generator = random.Random(seed)
    for numbers in by_source.values():
        generator.shuffle(numbers)
    turns = min(n, max(map(len, by_source.values()), default=0))
    order = [numbers[turn] for turn in range(turns) for numbers in by_source.values() if turn < len(numbers)]
    return [rows[number] for number in order[:n]]


def _reward_row(row: Mapping[str, Any], key: str, own_function: bool, truth_key: str = GROUND_TRUTH) -> RewardRow:
    from verl.workers.reward_manager.check import RewardRow

    source = value_at(row, key) if row.get(key) is None else row[key]
    if source is None and not own_function:
        raise ValueError(
            f"data.reward_fn_key: rows have no {key!r}. Set it to the column that names the data source, or set "
            f"custom_reward_function.path. Columns: {', '.join(row)}."
        )
    return RewardRow(source or UNKNOWN_SOURCE, ground_truth_of(row, truth_key), dict(row.get("extra_info") or {}))


def _check_sources(rows: Sequence[RewardRow], own_function: bool) -> None:
    """Raise ValueError for a data source without a reward function."""
    known = known_data_sources()
    for row in rows:
        if not own_function and matching(str(row.data_source), known) is None:
            raise ValueError(unknown_source(str(row.data_source), known))
