"""Scores of generated trajectories, from reward managers and agents, and the columns in which agents report on them.

Reward metrics and accuracy are computed from the scores; `workers/reward_manager/scorer.py` counts scoring errors.
Agents report a status, further fields and measurements.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl.algos.groups import Trajectories
from verl.config import RolloutConfig
from verl.protocol import DataProto, object_array
from verl.trainer.common.run_summary import TOOL_SHARE
from verl.trainer.common.training_health import NoSamplesError
from verl.types.schema import RESERVED
from verl.workers.reward_manager.naive import FAILED_COLUMN
from verl.workers.reward_manager.scorer import error_metrics

logger = logging.getLogger(__name__)

# Object columns of agents.
_AGENT_SCORE, _REWARD_INFO = "given_score", "reward_extra_info"
_EXTRA_FIELDS, _AGENT_METRICS = "extra_fields", "agent_metrics"

Correctness = dict[str, list[bool]]
"""Whether each response is correct, by data source."""

SUMMED_AGENT_METRICS = (
    "agent_loop/trajectories",
    "agent_loop/failures",
    "agent_loop/tools",
    "agent_loop/unmatched_tokens",
)
"""Prefixes of agent metrics that are summed over batches; all others are averaged."""
# Status of a trajectory that its agent has completed. The other statuses are `aborted` and `failed`.
_FINISHED = "finished"
# Metric name → key in the measurements of a trajectory.
_MEASUREMENTS = {
    "generate_sequences": "generate_s",
    "tool_calls": "tool_s",
    "compute_score": "compute_score_s",
    "num_preempted": "num_preempted",
}
_SECONDS = ("generate_s", "tool_s", "compute_score_s")
# Steps without a tool call before a warning.
_STEPS_WITHOUT_TOOLS = 3


class NoRewards:
    """Reward manager of runs without rewards: every score is 0."""

    def __call__(self, data: DataProto, return_dict: bool = True) -> dict[str, Any]:
        return {"reward_tensor": torch.zeros(data.batch["responses"].shape), "reward_extra_info": {}}

    def close(self) -> None:
        """No effect."""


# ---------------------------------------------------------------- scores


def compute_reward(data: DataProto, reward_fn: Callable[..., Any]) -> tuple[torch.Tensor, dict[str, list[Any]]]:
    """Return scores [batch, response] with turn rewards, and further values (see `score_responses`)."""
    scores, extra = score_responses(data, reward_fn)
    return with_turn_rewards(scores, data), extra


def with_turn_rewards(scores: torch.Tensor, data: DataProto) -> torch.Tensor:
    """Return scores [batch, response] plus the batch's `turn_rewards`, if it has any."""
    return scores + data.batch["turn_rewards"] if "turn_rewards" in data.batch.keys() else scores


def score_responses(data: DataProto, reward_fn: Callable[..., Any]) -> tuple[torch.Tensor, dict[str, list[Any]]]:
    """Return scores [batch, response] and the further values of reward functions and agents (a list per name).

    The score of a trajectory is on its last row, without turn rewards; further values are on all its rows. A value with
    the name of an existing column is renamed to `reward_<name>`. Unfinished trajectories, and trajectories whose agent
    has returned a score, are not passed to `reward_fn`.

    If `reward_fn.on_error` is `mask`, rows that could not be scored get `response_mask` 0 in `data`: losses, counts,
    metrics and group estimators ignore them.
    """
    trajectories = Trajectories.of(data)
    agent_scores, unscored = _agent_scores(data, trajectories)
    scores = torch.zeros(data.batch["responses"].shape)
    info: dict[str, list[Any]] = {}
    if len(unscored) == len(data):
        result = reward_fn(data, return_dict=True)
        scores, info = result["reward_tensor"], dict(result["reward_extra_info"])
    elif len(unscored):
        rows = trajectories.last_rows[unscored]
        result = reward_fn(data.select_idxs(rows), return_dict=True)
        scores = scores.to(result["reward_tensor"])
        scores[torch.from_numpy(rows)] = result["reward_tensor"]
        info = {
            name: _scatter(unscored, values, len(trajectories)) for name, values in result["reward_extra_info"].items()
        }
        if FAILED_COLUMN in info:
            info[FAILED_COLUMN] = [value or 0.0 for value in info[FAILED_COLUMN]]
    if agent_scores:
        scores = scores + place_scores(agent_scores, data, trajectories)
    for name, values in _agent_reward_info(data, trajectories).items():
        before = info.get(name, [None] * len(trajectories))
        info[name] = [old if new is None else new for new, old in zip(values, before, strict=True)]
    taken = {*data.batch.keys(), *data.non_tensor_batch}
    extra = {
        f"reward_{name}" if name in taken else name: [values[number] for number in trajectories.of_row]
        for name, values in info.items()
    }
    if getattr(reward_fn, "on_error", None) == "mask" and any(extra.get(FAILED_COLUMN, ())):
        mask = data.batch["response_mask"]
        kept = 1 - torch.tensor(extra[FAILED_COLUMN], device=mask.device)
        data.batch["response_mask"] = mask * kept[:, None].to(mask.dtype)
    return scores, extra


def _scatter(indices: Iterable[int], values: Iterable[Any], count: int) -> list[Any]:
    """Return a list of `count` entries: these values at these indices, None elsewhere."""
    entries: list[Any] = [None] * count
    for index, value in zip(indices, values, strict=True):
        entries[index] = value
    return entries


def _agent_scores(batch: DataProto, trajectories: Trajectories) -> tuple[dict[int, float], np.ndarray]:
    """Return the scores of agents by trajectory number, and the numbers of trajectories that `reward_fn` scores."""
    numbers = np.arange(len(trajectories))
    if _AGENT_SCORE not in batch.non_tensor_batch:
        return {}, numbers
    finished = numbers[np.logical_not(unfinished_agents(batch, trajectories))].tolist()
    column = batch.non_tensor_batch[_AGENT_SCORE][trajectories.last_rows]
    scores = {number: float(column[number]) for number in finished if column[number] is not None}
    return scores, np.array([number for number in finished if number not in scores], dtype=np.int64)


def place_scores(scores: Mapping[int, float], batch: DataProto, trajectories: Trajectories) -> torch.Tensor:
    """Return scores [batch, response], each at the last model token of its trajectory; without model tokens it is
    dropped. `scores`: by trajectory number."""
    mask = batch.batch["response_mask"].bool()
    placed = torch.zeros(mask.shape)
    for number, score in scores.items():
        row = trajectories.last_rows[number]
        if mask[row].any():
            placed[row, int(mask[row].nonzero().max())] = score
    return placed


def _agent_reward_info(batch: DataProto, trajectories: Trajectories) -> dict[str, list[Any]]:
    """Return the values of the agents' field `reward_extra_info`: by name, one entry per trajectory."""
    if _REWARD_INFO not in batch.non_tensor_batch:
        return {}
    infos = [info or {} for info in batch.non_tensor_batch[_REWARD_INFO][trajectories.last_rows]]
    return {name: [info.get(name) for info in infos] for name in dict.fromkeys(name for info in infos for name in info)}


def reward_metrics(extra: Mapping[str, Iterable[Any]]) -> dict[str, float]:
    """Return `reward/<name>/mean` over the numbers in each column, and the number of scoring errors, in total
    (`reward/errors`) and by kind (`reward/errors/timeout`, …: see `error_metrics`)."""
    metrics = {}
    for name, values in extra.items():
        numbers = [float(value) for value in values if isinstance(value, int | float | np.number)]
        numbers = [number for number in numbers if math.isfinite(number)]
        if numbers:
            metrics[f"reward/{name}/mean"] = sum(numbers) / len(numbers)
    return metrics | error_metrics(extra)


# ---------------------------------------------------------------- accuracy


def response_scores(
    scores: torch.Tensor, trajectories: Trajectories, failed: Iterable[Any] | None
) -> list[float | None]:
    """Return the score of each trajectory. `scores` [batch]: score of each row.

    `failed`: the column `scoring_failed`, or None. The score of a trajectory that could not be scored is None if it is
    masked, else 0 (`reward_model.on_error`).
    """
    values: list[float | None] = trajectories.sum(scores).tolist()
    if failed is None:
        return values
    kept = trajectories.mask.bool().any(-1).tolist()
    flags = list(failed)
    unscored = [bool(flags[row]) for row in trajectories.last_rows]
    triples = zip(values, unscored, kept, strict=True)
    return [None if is_unscored and not is_kept else value for value, is_unscored, is_kept in triples]


def correct_responses(
    sources: Sequence[str],
    scores: Sequence[float | None],
    accuracies: Sequence[Any] | None,
    scores_are_continuous: bool,
    unfinished: Sequence[bool] | None = None,
) -> Correctness:
    """Return by data source whether each response is correct.

    A response is correct if its `acc` (`accuracies`) is at least 1; if that is not a number, if its score
    (`response_scores`) is at least 1. Scores of a reward model are continuous (`scores_are_continuous`): without `acc`,
    the response is left out. Responses that could not be scored (None) are left out, too. The response of an
    `unfinished` agent counts as wrong; with `scores_are_continuous`, only if other responses of its source are counted.
    """
    flags = correct_flags(sources, scores, accuracies, scores_are_continuous, unfinished)
    correct: Correctness = defaultdict(list)
    for source, flag in zip(sources, flags, strict=True):
        if flag is not None:
            correct[source].append(flag)
    return dict(correct)


def correct_flags(
    sources: Sequence[str],
    scores: Sequence[float | None],
    accuracies: Sequence[Any] | None,
    scores_are_continuous: bool,
    unfinished: Sequence[bool] | None = None,
) -> list[bool | None]:
    """Return whether each response is correct; None if it is left out. Arguments: see `correct_responses`."""
    flags: list[bool | None] = []
    is_failed = unfinished or [False] * len(scores)
    for score, acc, is_unfinished in zip(scores, accuracies or [None] * len(scores), is_failed, strict=True):
        if is_unfinished:
            flags.append(None)
        elif isinstance(acc, bool | int | float | np.number | np.bool_):
            flags.append(bool(acc >= 1.0))
        else:
            flags.append(None if scores_are_continuous or score is None else score >= 1.0)
    counted = {source for source, flag in zip(sources, flags, strict=True) if flag is not None}
    return [
        False if failed and (source in counted or not scores_are_continuous) else flag
        for source, flag, failed in zip(sources, flags, is_failed, strict=True)
    ]


def log_accuracy(correct: Correctness, step: int | None = None) -> None:
    """Log one line per data source, in the format of other verl versions.

    `step`: the training step of the responses; the console may show the text in the line of this step.
    """
    for source, responses in correct.items():
        total, count = len(responses), sum(responses)
        text = f"{source} Correct: {count}/{total}, Accuracy: {count / total:.2f}"
        if step is None:
            logger.info("%s", text)
        else:
            logger.info("step %d: %s", step, text, extra={"step_note": text})


def log_step_accuracy(
    batch: DataProto, extra: Mapping[str, Any], source_key: str, scores_are_continuous: bool, step: int
) -> None:
    """Log the accuracy of a training batch with `answer_scores`; `extra` names the columns that the reward added."""
    columns, trajectories = batch.non_tensor_batch, Trajectories.of(batch)
    rows = trajectories.last_rows
    sources = columns[source_key][rows].tolist() if source_key in columns else ["unknown"] * len(trajectories)
    accuracies = columns["acc"][rows].tolist() if "acc" in extra else None
    scores = response_scores(batch.batch["answer_scores"], trajectories, columns.get(FAILED_COLUMN))
    unfinished = unfinished_agents(batch, trajectories)
    log_accuracy(correct_responses(sources, scores, accuracies, scores_are_continuous, unfinished), step)


# ---------------------------------------------------------------- reports of agents


def spread_extra_fields(batch: DataProto) -> None:
    """Convert every extra field of agents to a column, with None for agents without the field. A field with the name of
    an existing column is renamed to `agent_<name>`."""
    if _EXTRA_FIELDS not in batch.non_tensor_batch:
        return
    fields = batch.pop(non_tensor_batch_keys=[_EXTRA_FIELDS]).non_tensor_batch[_EXTRA_FIELDS]
    taken = {*batch.batch.keys(), *batch.non_tensor_batch, *RESERVED}
    for name in dict.fromkeys(name for row in fields for name in row):
        column = f"agent_{name}" if name in taken else name
        batch.non_tensor_batch[column] = object_array([row.get(name) for row in fields])


def unfinished_agents(batch: DataProto, trajectories: Trajectories) -> list[bool]:
    """Return, per trajectory, whether its agent failed or was aborted."""
    return [status != _FINISHED for status in _statuses(batch, trajectories)]


def require_some_finished(batch: DataProto, failed_before: int = 0, limit: int = 1) -> int:
    """Return the number of consecutive unfinished trajectories, including `failed_before` of earlier batches.

    Raises NoSamplesError if it reaches `limit`: the next trajectories would fail for the same reason.
    """
    if _AGENT_METRICS not in batch.non_tensor_batch:
        return 0
    trajectories = Trajectories.of(batch)
    if _FINISHED in _statuses(batch, trajectories):
        return 0
    measurements = _measurements(batch, trajectories)
    failed = failed_before + len(measurements)
    if failed < limit:
        return failed
    errors = [str(item["error"]) for item in measurements if item.get("error")]
    raise NoSamplesError(
        f"agents: none of {failed} trajectories finished, so there is nothing to train on. The last error:"
        f" {errors[-1] if errors else 'the generation was aborted'}"
    )


def _measurements(batch: DataProto, trajectories: Trajectories) -> list[Mapping[str, Any]]:
    """Return the measurements of each trajectory's agent; [] for batches without agents."""
    columns = batch.non_tensor_batch
    return [item or {} for item in columns[_AGENT_METRICS][trajectories.last_rows]] if _AGENT_METRICS in columns else []


def _statuses(batch: DataProto, trajectories: Trajectories) -> list[str]:
    """Return the status of each trajectory: finished, aborted or failed."""
    measurements = _measurements(batch, trajectories)
    return [str(item.get("status", _FINISHED)) for item in measurements] or [_FINISHED] * len(trajectories)


def agent_metrics(batch: DataProto) -> dict[str, float]:
    """Return metrics over all trajectories of a batch, including failed ones; {} for batches without agents."""
    if _AGENT_METRICS not in batch.non_tensor_batch:
        return {}
    trajectories = Trajectories.of(batch)
    measurements = _measurements(batch, trajectories)
    metrics: dict[str, float] = {}
    for name, key in _MEASUREMENTS.items():
        metrics |= _stats(f"agent_loop/{name}", [float(item.get(key, 0.0)) for item in measurements])
    metrics |= _stats("tool_call_counts", [float(item.get("tool_calls", 0)) for item in measurements])
    seconds = [sum(float(item.get(key, 0.0)) for key in _SECONDS) for item in measurements]
    slowest = seconds.index(max(seconds))
    for name, key in _MEASUREMENTS.items():
        metrics[f"agent_loop/slowest/{name}"] = float(measurements[slowest].get(key, 0.0))
    width = batch.batch["responses"].shape[1]
    attention = batch.batch["attention_mask"][trajectories.of_row == slowest]
    metrics["agent_loop/slowest/prompt_length"] = float(attention[0, :-width].sum())
    metrics["agent_loop/slowest/response_length"] = float(attention[:, -width:].sum())
    tool_s, model_s = (sum(float(item.get(key, 0.0)) for item in measurements) for key in ("tool_s", "generate_s"))
    if tool_s + model_s > 0:
        metrics[TOOL_SHARE] = tool_s / (tool_s + model_s)
    return metrics | _agent_counts(measurements)


def _agent_counts(measurements: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Count unfinished trajectories and failures by kind, and add up calls, errors and seconds per tool."""
    counts: dict[str, float] = defaultdict(float)
    counts |= dict.fromkeys(("agent_loop/trajectories/failed", "agent_loop/trajectories/aborted"), 0.0)
    for item in measurements:
        if (status := item.get("status", _FINISHED)) != _FINISHED:
            counts[f"agent_loop/trajectories/{status}"] += 1
        counts["agent_loop/unmatched_tokens"] += item.get("unmatched_tokens", 0)
        for kind, count in item.get("failures", {}).items():
            counts[f"agent_loop/failures/{kind}"] += count
        for tool, values in item.get("tools", {}).items():
            for name, value in values.items():
                counts[f"agent_loop/tools/{tool}/{name}"] += value
    return dict(counts)


def _stats(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}/min": min(values), f"{name}/max": max(values), f"{name}/mean": sum(values) / len(values)}


class ToolUseCheck:
    """Warns once if the model calls no tool in the first steps although tools are configured."""

    def __init__(self, rollout: RolloutConfig, searches: bool = False) -> None:
        """`searches`: the run uses `do_search`."""
        keys = rollout.multi_turn
        paths = [path for path in (keys.tool_config_path, keys.function_tool_path) if path is not None]
        self._configured = ", ".join(paths)
        self._advice = (
            "Describe the tools in the prompt (the chat template must write `tools`), check that the model writes calls"
            f" in the format of actor_rollout_ref.rollout.multi_turn.format={keys.format}"
        )
        if searches:
            self._configured = "do_search=True"
            self._advice = "Tell the model in its prompt to write <search> query </search>"
        self._steps_without: int | None = 0 if self._configured else None
        """None: no further checks."""

    def check(self, metrics: Mapping[str, float], example: Callable[[], str]) -> None:
        """Check the agent metrics of a step; `example()` returns the text of one response."""
        if self._steps_without is None or "tool_call_counts/max" not in metrics:
            return
        self._steps_without = None if metrics["tool_call_counts/max"] else self._steps_without + 1
        if self._steps_without == _STEPS_WITHOUT_TOOLS:
            self._steps_without = None
            logger.warning(
                "no tool was called in %d steps, although tools are configured (%s). %s, or start from a model that"
                " was trained to call tools. A response: %r",
                *(_STEPS_WITHOUT_TOOLS, self._configured, self._advice, example()[:600]),
            )
