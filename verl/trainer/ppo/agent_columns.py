"""Columns in which agents report on their trajectories: status, further fields, measurements, and metrics of them."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl.algos.groups import Trajectories
from verl.config import RolloutConfig
from verl.protocol import DataProto, object_array
from verl.trainer.common.run_summary import TOOL_SHARE
from verl.trainer.common.training_health import NoSamplesError
from verl.types.schema import RESERVED

logger = logging.getLogger(__name__)

SUMMED_AGENT_METRICS = (
    "agent_loop/trajectories",
    "agent_loop/failures",
    "agent_loop/tools",
    "agent_loop/unmatched_tokens",
)
"""Prefixes of agent metrics that are summed over batches; all others are averaged."""
# Status of a trajectory that its agent has completed. The other statuses are `aborted` and `failed`.
_FINISHED = "finished"
# Object columns.
_EXTRA_FIELDS, _AGENT_METRICS = "extra_fields", "agent_metrics"
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
