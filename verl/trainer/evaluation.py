"""Scores of answers in a file: every answer by the reward function of its data source, and what they say per source."""

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
from verl.utils.dataset.files import find_files
from verl.utils.dataset.problems import Rule, data_source_rules, ground_truth_of, ground_truth_rule, raise_problems
from verl.utils.dataset.rows import Rows, value_at
from verl.utils.reward_score import known_data_sources
from verl.utils.reward_score.registry import UNKNOWN_SOURCE
from verl.workers.reward_manager.naive import RewardError, describe_failures
from verl.workers.reward_manager.scorer import Sample, Score

__all__ = ["evaluate", "reward_rules", "scored", "show"]

logger = logging.getLogger(__name__)

_SHOWN = ("mean@", "pass@", "maj@")
_BOUNDS = ("/std", "/low", "/high")

Metrics = dict[str, dict[str, dict[str, float]]]


def evaluate(config: EvalConfig) -> Metrics:
    """data source → variable (`reward`, and what the reward function says beside it) → metric.

    Metrics are those of validation: mean@n, pass@k, best@k, maj@k. They go to `data.output_path` too, if set.
    """
    data = config.data
    rows = Rows(find_files(data.path))
    raise_problems(rows, [_answers_rule(data.response_key), *reward_rules(config)])
    prompts, samples = _samples(rows, config)
    scores = scored(config, samples)
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
    sources = Counter(sample.data_source for sample in samples)
    asked = Counter(source for source, _ in {(s.data_source, p) for s, p in zip(samples, prompts, strict=True)})
    for source, count in sources.items():
        logger.info("%s: %d answers to %d prompts", source, count, asked[source])
    return metrics


def show(metrics: Metrics, console: Console) -> None:
    """A table: the metrics of each data source, with their 95 % intervals over prompts."""
    table = Table()
    for name in ("data source", "of", "metric"):
        table.add_column(name)
    for name in ("value", "95 % interval"):
        table.add_column(name, justify="right")
    for source, variables in metrics.items():
        # `acc` where the reward function tells right from wrong beside its reward.
        variable = "acc" if "acc" in variables else "reward"
        values = variables[variable]
        for name, value in values.items():
            if name.startswith(_SHOWN) and not name.endswith(_BOUNDS):
                low, high = values.get(f"{name}/low"), values.get(f"{name}/high")
                interval = "" if low is None or high is None else f"{low:.3f} to {high:.3f}"
                table.add_row(escape(source), variable, name, f"{value:.3f}", interval)
        table.add_section()
    console.print(table)


def reward_rules(config: EvalConfig | SFTConfig) -> list[Rule]:
    """Rows say what scores them, and hold what that needs."""
    key = config.data.reward_fn_key
    if get_custom_reward_fn(config.to_dict()) is not None:
        return []
    return [*data_source_rules(key, known_data_sources()), ground_truth_rule(config.data.ground_truth_key)]


def _answers_rule(key: str) -> Rule:
    def check(row: dict[str, Any], columns: Sequence[str]) -> str | None:
        answers = _answers(row, key)
        if answers and all(isinstance(answer, str) for answer in answers):
            return None
        return f"{key!r} holds no answers (columns: {', '.join(columns)}). Set data.response_key to a column of texts."

    return Rule((key.split(".")[0],), check, lambda _: False)


def _answers(row: Mapping[str, Any], key: str) -> list[Any]:
    value = value_at(row, key)
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _samples(rows: Rows, config: EvalConfig) -> tuple[list[int], list[Sample]]:
    """Which row each answer belongs to, and what its reward function is told."""
    prompts, samples = [], []
    for first, batch in rows.batches(rows.columns):
        for number, row in enumerate(batch, first):
            source, extra = value_at(row, config.data.reward_fn_key) or UNKNOWN_SOURCE, row.get("extra_info")
            truth = ground_truth_of(row, config.data.ground_truth_key)
            for answer in _answers(row, config.data.response_key):
                prompts.append(number)
                samples.append(Sample(source, answer, truth, dict(extra or {})))
    return prompts, samples


def scored(config: EvalConfig | SFTConfig, samples: Sequence[Sample]) -> list[Score]:
    """Every sample by its reward function; one that fails ends this, or scores 0, as `reward_model.on_error` says."""
    manager = load_reward_manager(config.to_dict(), None, 0)
    try:
        scores = manager.score(samples)
    finally:
        manager.close()
    if any(score.error is not None for score in scores):
        told = describe_failures(samples, scores, config.reward_model.on_error)
        if config.reward_model.on_error == "fail":
            raise RewardError(told)
        logger.warning("%s", told)
    return scores
