"""Score the responses in a file by the reward functions of their data sources; metrics per data source."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl.config import EvalConfig, SFTConfig
from verl.trainer.ppo.metric_utils import process_validation_metrics
from verl.trainer.ppo.reward import get_custom_reward_fn, load_reward_manager
from verl.utils.dataset.problems import RowRule, data_source_rules, ground_truth_rule, raise_problems
from verl.utils.dataset.rows import Rows, find_files, ground_truth_of, value_at
from verl.utils.reward_score import known_data_sources
from verl.utils.reward_score.registry import UNKNOWN_SOURCE
from verl.workers.reward_manager.naive import RewardError, describe_failures
from verl.workers.reward_manager.scorer import Sample, Score

logger = logging.getLogger(__name__)

_SHOWN_METRICS = ("mean@", "pass@", "maj@")
_SUFFIXES = ("/std", "/low", "/high")

Metrics = dict[str, dict[str, dict[str, float]]]


def evaluate(config: EvalConfig) -> Metrics:
    """Return data source → variable (`reward`, and further outputs of the reward function) → metric → value.

    The metrics are the same as in validation: mean@n, pass@k, best@k, maj@k. They are also written to
    `data.output_path`, if set.
    """
    data = config.data
    rows = Rows(find_files(data.path))
    raise_problems(rows, [_responses_rule(data.response_key), *reward_rules(config)])
    prompts, samples = _samples(rows, config)
    scores = score_samples(config, samples)
    names = dict.fromkeys(name for score in scores for name in score.extra)
    columns = {name: [score.extra.get(name) for score in scores] for name in names}
    masked = config.reward_model.on_error == "mask"
    metrics = process_validation_metrics(
        [sample.data_source for sample in samples],
        [str(prompt) for prompt in prompts],
        {**columns, "reward": [None if masked and score.error is not None else score.value for score in scores]},
    )
    if data.output_path is not None:
        Path(data.output_path).write_text(json.dumps(metrics, indent=1, sort_keys=True) + "\n")
    responses = Counter(sample.data_source for sample in samples)
    prompt_count = Counter(source for source, _ in {(s.data_source, p) for s, p in zip(samples, prompts, strict=True)})
    for source, count in responses.items():
        logger.info("%s: %d responses to %d prompts", source, count, prompt_count[source])
    return metrics


def show_metrics(metrics: Metrics, console: Console) -> None:
    """Print a table with the metrics of each data source and their 95 % intervals over prompts."""
    table = Table()
    for name in ("data source", "variable", "metric"):
        table.add_column(name)
    for name in ("value", "95 % interval"):
        table.add_column(name, justify="right")
    for source, variables in metrics.items():
        # A reward function may return the correctness (`acc`) in addition to its reward.
        variable = "acc" if "acc" in variables else "reward"
        values = variables[variable]
        for name, value in values.items():
            if name.startswith(_SHOWN_METRICS) and not name.endswith(_SUFFIXES):
                low, high = values.get(f"{name}/low"), values.get(f"{name}/high")
                interval = "" if low is None or high is None else f"{low:.3f} to {high:.3f}"
                table.add_row(escape(source), variable, name, f"{value:.3f}", interval)
        table.add_section()
    console.print(table)


def reward_rules(config: EvalConfig | SFTConfig) -> list[RowRule]:
    """Return the rules for rows that a reward function scores: a known data source and a ground truth."""
    key = config.data.reward_fn_key
    if get_custom_reward_fn(config.to_dict()) is not None:
        return []
    return [*data_source_rules(key, known_data_sources()), ground_truth_rule(config.data.ground_truth_key)]


def _responses_rule(key: str) -> RowRule:
    def check(row: dict[str, Any], columns: Sequence[str]) -> str | None:
        responses = _responses(row, key)
        if responses and all(isinstance(response, str) for response in responses):
            return None
        return f"{key!r} has no responses (columns: {', '.join(columns)}). Set data.response_key to a column of texts."

    return RowRule((key.split(".")[0],), check, lambda _: False)


def _responses(row: Mapping[str, Any], key: str) -> list[Any]:
    value = value_at(row, key)
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _samples(rows: Rows, config: EvalConfig) -> tuple[list[int], list[Sample]]:
    """Return the row number of each response, and the input of its reward function."""
    prompts, samples = [], []
    for first, batch in rows.batches(rows.columns):
        for number, row in enumerate(batch, first):
            source, extra = value_at(row, config.data.reward_fn_key) or UNKNOWN_SOURCE, row.get("extra_info")
            truth = ground_truth_of(row, config.data.ground_truth_key)
            for response in _responses(row, config.data.response_key):
                prompts.append(number)
                samples.append(Sample(source, response, truth, dict(extra or {})))
    return prompts, samples


def score_samples(config: EvalConfig | SFTConfig, samples: Sequence[Sample]) -> list[Score]:
    """Score every sample by its reward function; failures raise or score 0, as set by `reward_model.on_error`."""
    manager = load_reward_manager(config.to_dict(), None, 0)
    try:
        scores = manager.score(samples)
    finally:
        manager.close()
    if any(score.error is not None for score in scores):
        message = describe_failures(samples, scores, config.reward_model.on_error)
        if config.reward_model.on_error == "fail":
            raise RewardError(message)
        logger.warning("%s", message)
    return scores
