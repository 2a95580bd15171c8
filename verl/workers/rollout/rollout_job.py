"""RolloutJob: the rows of one consumer in a host; RolloutTask: one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from verl.protocol import DataProto
from verl.types.request import Output, Request, SamplingParams
from verl.types.trajectory import Trajectory
from verl.utils.counter_noise import sample_keys
from verl.workers.rollout.prompts import new_request_id, response_limits, trajectories_from_prompts
from verl.workers.rollout.training_rows import rows_from_trajectories

__all__ = ["RolloutJob", "RolloutTask"]


@dataclass(slots=True, eq=False)
class RolloutTask:
    """One row to generate."""

    trajectory: Trajectory
    """The prompt; turns are added when the row has finished."""
    step: int
    """The training step, on which the sampling noise depends."""
    limit: int
    """Maximum number of response tokens of a context."""
    sampled: bool
    """False: greedy."""
    columns: dict[str, Any] = field(default_factory=dict)
    """The row's object columns, for agent loops."""
    partial: Output | None = None
    """An earlier partial output of the first model call, to resume from."""
    reported: int = 0
    """Number of tokens of the first model call that were reported to the manager."""
    cancelled: bool = False
    result: Any = None
    """Set when the task has finished; `LoopHost._finished_trajectory` converts it to a trajectory."""
    key: str = ""
    """Unique in its job: the trajectory's name, or the row number in `generate_batch`, whose names may repeat."""

    @property
    def name(self) -> str:
        return self.trajectory.name

    @property
    def prompt_ids(self) -> list[int]:
        return np.asarray(self.trajectory.rows[0].prompt_ids).tolist()


class RolloutJob:
    """The rows of one consumer, with common sampling parameters."""

    def __init__(self, name: str, meta: Mapping[str, Any], params: SamplingParams, seed: int, pad: int) -> None:
        self.name, self.meta, self.params, self.seed = name, meta, params, seed
        self.pad_token_id = pad if meta.get("pad_token_id") is None else int(meta["pad_token_id"])
        self.agent_columns = bool(meta.get("agent_columns"))
        """Whether rows have the columns of agents (`num_turns`, `agent_metrics`, …), also single-turn rows."""
        self.unfinished: dict[str, RolloutTask] = {}
        self.finished: list[RolloutTask] = []
        self.prompt_width = 0
        self._variants: dict[tuple[bool, int], SamplingParams] = {}
        """Parameters of rows by (sampled, limit), without the noise key."""

    def tasks(self, rows: DataProto, partials: Mapping[str, Output], with_columns: bool) -> list[RolloutTask]:
        """The tasks of these rows; ValueError for a row with invalid columns. `with_columns`: tasks get the object
        columns, for agent loops."""
        trajectories = trajectories_from_prompts(rows)
        limits = response_limits(rows, trajectories, self.params.max_new_tokens)
        columns, step = rows.non_tensor_batch, int(rows.meta_info.get("step", self.meta.get("step", 0)))
        sampled = columns.get("do_sample", [self.params.do_sample] * len(rows))
        self.prompt_width = max(self.prompt_width, rows.batch["input_ids"].shape[1])
        tasks = []
        for row, trajectory in enumerate(trajectories):
            task = RolloutTask(trajectory, step, limits[row], bool(sampled[row]), key=trajectory.name)
            if with_columns:
                task.columns = {name: values[row] for name, values in columns.items()}
            task.partial = partials.get(trajectory.name)
            task.reported = 0 if task.partial is None else len(task.partial.token_ids)
            tasks.append(task)
        return tasks

    def request(self, task: RolloutTask, limit: int) -> Request:
        """The request of a task's first model call, of at most `limit` tokens. Its sampling noise depends on seed,
        step, uid and sample index."""
        uid, variant = task.trajectory.uid, (task.sampled, limit)
        if variant not in self._variants:
            minimum = self.params.min_new_tokens
            minimum = min(limit, minimum) if self.agent_columns else minimum
            self._variants[variant] = replace(
                self.params, do_sample=task.sampled, max_new_tokens=limit, min_new_tokens=minimum
            )
        params = self._variants[variant].with_key(sample_keys(self.seed, task.step, uid, task.trajectory.sample_index))
        return Request(new_request_id(task.name), task.prompt_ids, params, uid, task.partial)

    def pack(self, trajectories: Sequence[Trajectory], no_experts: np.ndarray | None) -> DataProto:
        """The training rows of finished trajectories."""
        validate = bool(self.meta.get("validate"))
        longest = max(len(row.prompt_ids) for trajectory in trajectories for row in trajectory.rows)
        return rows_from_trajectories(
            trajectories,
            pad_token_id=self.pad_token_id,
            prompt_length=max(longest, self.prompt_width),
            response_length=self.params.max_new_tokens if self.meta.get("pad_to_max") else None,
            # Validation rows are not trained on, and have other sampling parameters.
            with_drawn=self.params.reshaped and not validate,
            with_experts=not validate,
            no_experts=no_experts,
        )
