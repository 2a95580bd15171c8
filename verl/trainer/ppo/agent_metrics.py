"""Numbers about a step's agents: seconds in the model and in tools, calls, what went wrong; tools that nobody calls."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl.algos.trajectories import Trajectories
from verl.config import RolloutConfig
from verl.protocol import DataProto
from verl.trainer.ppo.agents import FINISHED, metrics_of

logger = logging.getLogger(__name__)

COUNTED = ("agent_loop/trajectories", "agent_loop/failures", "agent_loop/tools", "agent_loop/unmatched_tokens")
"""Beginnings of the names of metrics that add up over batches; the others are means."""
TOOL_SHARE = "agent_loop/tool_share"
# Name of the metric → what an agent calls it.
_MEASURED = {
    "generate_sequences": "generate_s",
    "tool_calls": "tool_s",
    "compute_score": "compute_score_s",
    "num_preempted": "num_preempted",
}
_SECONDS = ("generate_s", "tool_s", "compute_score_s")
_PATIENCE = 3


def agent_metrics(batch: DataProto) -> dict[str, float]:
    """Of all trajectories of a batch, those that failed too; nothing of a batch that no agent made."""
    if "agent_metrics" not in batch.non_tensor_batch:
        return {}
    whole = Trajectories.of(batch)
    said = metrics_of(batch, whole)
    found: dict[str, float] = {}
    for name, key in _MEASURED.items():
        found |= _stats(f"agent_loop/{name}", [float(one.get(key, 0.0)) for one in said])
    found |= _stats("tool_call_counts", [float(one.get("tool_calls", 0)) for one in said])
    took = [sum(float(one.get(key, 0.0)) for key in _SECONDS) for one in said]
    slowest = took.index(max(took))
    for name, key in _MEASURED.items():
        found[f"agent_loop/slowest/{name}"] = float(said[slowest].get(key, 0.0))
    width = batch.batch["responses"].shape[1]
    attention = batch.batch["attention_mask"][whole.of_row == slowest]
    found["agent_loop/slowest/prompt_length"] = float(attention[0, :-width].sum())
    found["agent_loop/slowest/response_length"] = float(attention[:, -width:].sum())
    in_tools, in_model = (sum(float(one.get(key, 0.0)) for one in said) for key in ("tool_s", "generate_s"))
    if in_tools + in_model > 0:
        found[TOOL_SHARE] = in_tools / (in_tools + in_model)
    return found | _counts(said)


def _counts(said: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How many did not go through to their end, what went wrong by kind, and of each tool calls, errors, seconds."""
    counts: dict[str, float] = defaultdict(float)
    counts |= dict.fromkeys(("agent_loop/trajectories/failed", "agent_loop/trajectories/aborted"), 0.0)
    for one in said:
        if (status := one.get("status", FINISHED)) != FINISHED:
            counts[f"agent_loop/trajectories/{status}"] += 1
        counts["agent_loop/unmatched_tokens"] += one.get("unmatched_tokens", 0)
        for kind, times in one.get("failures", {}).items():
            counts[f"agent_loop/failures/{kind}"] += times
        for tool, its in one.get("tools", {}).items():
            for name, value in its.items():
                counts[f"agent_loop/tools/{tool}/{name}"] += value
    return dict(counts)


def _stats(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}/min": min(values), f"{name}/max": max(values), f"{name}/mean": sum(values) / len(values)}


_WITH_TOOLS = (
    "Tell the model of them in its prompt (its chat template must write `tools`), check that it writes calls as"
    " actor_rollout_ref.rollout.multi_turn.format=%s wants them"
)
_WITH_SEARCH = "Tell the model in its prompt to write <search> query </search>"


class ToolUse:
    """Watches the first steps: a model that never calls the tools it is given learns nothing of them."""

    def __init__(self, rollout: RolloutConfig, searches: bool = False) -> None:
        keys = rollout.multi_turn
        paths = [path for path in (keys.tool_config_path, keys.function_tool_path) if path is not None]
        self._given, self._advice = ", ".join(paths), _WITH_TOOLS % keys.format
        if searches:
            self._given, self._advice = "do_search=True", _WITH_SEARCH
        self._steps_without: int | None = 0 if self._given else None
        """None: there is nothing to look for any more."""

    def see(self, metrics: Mapping[str, float], example: Callable[[], str]) -> None:
        """The metrics of a step's agents; `example` gives what one of them said."""
        if self._steps_without is None or "tool_call_counts/max" not in metrics:
            return
        self._steps_without = None if metrics["tool_call_counts/max"] else self._steps_without + 1
        if self._steps_without == _PATIENCE:
            self._steps_without = None
            logger.warning(
                "no tool was called in %d steps, although there are some (%s). %s, or begin with a model that knows"
                " how. An answer: %r",
                _PATIENCE, self._given, self._advice, example()[:600],
            )  # fmt: skip
