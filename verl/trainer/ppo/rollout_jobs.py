"""Jobs of the RolloutManager: submitted rows, finished trajectories, and batches built from them without copies."""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import ray

from verl.config import ActorRolloutRefConfig
from verl.protocol import DataProto, object_array
from verl.single_controller.ray.batch_ref import BatchRef
from verl.single_controller.ray.column_store import (
    StoredRows,
    attach_bundle,
    bundle_rows,
    concat_columns,
    read_columns,
    take_rows,
)
from verl.trainer.ppo.rollout_hosts import HostKind, HostLoss, HostState
from verl.types.request import Output, join_outputs
from verl.types.trajectory import Headers, HostReply, Status, Trajectory
from verl.workers.rollout.prompts import RolloutJob, sampling_params
from verl.workers.rollout.training_rows import empty_experts, trajectories_from_rows

# Columns of a host's reply that are not copied to the batch: `join_prompt_columns` adds them.
_PROMPT_COLUMNS = ("uid", "sample_index")


@dataclass(frozen=True, slots=True, eq=False)
class RowsPart:
    """The rows of all trajectories in one reply of a host."""

    stored: StoredRows
    """Tensor columns, in the object store."""
    objects: Mapping[str, np.ndarray]
    """Object columns, in this process."""


@dataclass(frozen=True, slots=True, eq=False)
class FinishedTrajectory:
    """A finished trajectory: its header, and where its training rows are."""

    name: str
    """`uid/sample_index`, see `trajectory_names`."""
    uid: str
    sample_index: int
    status: Status
    score: float | None
    """The score that its agent returned; None: the agent returned none."""
    versions: tuple[int, ...]
    """Versions of the weights that sampled its tokens."""
    last_tokens: np.ndarray
    """Response tokens of its last row: the input of reward functions."""
    part: RowsPart
    first_row: int
    """Its rows are the rows `first_row` to `first_row + row_count - 1` of `part`."""
    row_count: int


OnFinished = Callable[[Sequence[FinishedTrajectory]], None]
"""Called by the collector thread of a host."""


@dataclass(slots=True, eq=False)
class SubmittedRow:
    """A submitted row that has not finished."""

    batch: DataProto
    """The submitted batch; this row is at `index`."""
    index: int
    prompt_length: int
    kind: HostKind
    parts: list[Output] = field(default_factory=list)
    """Consecutive parts of its output, as reported. They are joined when needed: joining at every report would take
    quadratic time."""
    host: HostState | None = None
    """None: not sent yet, or the host was lost."""

    @property
    def partial(self) -> Output | None:
        """The output so far; None if the host has reported none."""
        return join_outputs(list(self.parts), self.prompt_length) if self.parts else None


@dataclass(slots=True, eq=False)
class ManagedJob:
    """A job: its unfinished rows by trajectory name, and the events that were not collected yet."""

    name: str
    meta: Mapping[str, Any]
    on_finished: OnFinished
    rows: dict[str, SubmittedRow] = field(default_factory=dict)
    inbox: queue.SimpleQueue[list[FinishedTrajectory] | HostLoss] = field(default_factory=queue.SimpleQueue)

    def next_event(self, timeout: float) -> list[FinishedTrajectory] | HostLoss | None:
        """Remove and return the next event of the inbox; block up to `timeout` seconds, then return None."""
        try:
            return self.inbox.get(timeout=timeout)
        except queue.Empty:
            return None

    def take_finished(self) -> list[FinishedTrajectory]:
        """Remove and return the finished trajectories of the inbox without waiting; lost hosts stay in it."""
        finished, losses = [], []
        while not self.inbox.empty():
            event = self.inbox.get()
            if isinstance(event, HostLoss):
                losses.append(event)
            else:
                finished += event
        for loss in losses:
            self.inbox.put(loss)
        return finished

    def add_partials(self, outputs: Mapping[str, Output]) -> None:
        """Append newly reported output of unfinished rows."""
        for name, output in outputs.items():
            if (row := self.rows.get(name)) is not None:
                row.parts.append(output)


def trajectory_names(rows: DataProto) -> list[str]:
    """Return the ids of these rows, `uid/sample_index`. Raises ValueError if two rows have the same id."""
    columns = rows.non_tensor_batch
    names = [f"{uid}/{number}" for uid, number in zip(columns["uid"], columns["sample_index"], strict=True)]
    if len(set(names)) < len(names):
        repeated = next(name for name, count in Counter(names).items() if count > 1)
        raise ValueError(f"rollout: several rows have the id {repeated!r}. Make uid or sample_index unique.")
    return names


def finished_trajectories(reply: HostReply, rows: StoredRows) -> list[FinishedTrajectory]:
    """Return the trajectories of a host's reply, which has some. `rows`: their tensor columns."""
    headers = reply.headers
    assert headers is not None
    part = RowsPart(rows, {name: values for name, values in reply.objects.items() if name not in _PROMPT_COLUMNS})
    first_rows = np.cumsum([0, *headers.row_counts])
    return [
        FinishedTrajectory(
            name,
            headers.uids[number],
            int(headers.sample_indices[number]),
            headers.statuses[number],
            headers.scores[number],
            headers.versions[number],
            headers.last_tokens(number),
            part,
            int(first_rows[number]),
            int(headers.row_counts[number]),
        )
        for number, name in enumerate(headers.names)
    ]


def join_rows(finished: Sequence[FinishedTrajectory]) -> DataProto:
    """Return the training rows of these trajectories (at least one), in order; on Ray a BatchRef, whose tensor columns
    stay in the object store."""
    parts = list({id(trajectory.part): trajectory.part for trajectory in finished}.values())
    starts = np.cumsum([0, *(part.stored.rows for part in parts)])
    start_of = {id(part): int(start) for part, start in zip(parts, starts[:-1], strict=True)}
    spans = [(start_of[id(item.part)] + item.first_row, item.row_count) for item in finished]
    index = np.concatenate([np.arange(start, start + count) for start, count in spans])
    columns = take_rows(concat_columns([part.stored.columns for part in parts]), index)
    names = dict.fromkeys(name for part in parts for name in part.objects)
    objects = {name: _join_objects(name, parts)[index] for name in names}
    if isinstance(next(iter(columns.values())).refs[0].bundle, dict):  # without Ray, the tensors are in this process
        return DataProto.from_dict(read_columns(columns), objects)
    batch = BatchRef(columns, len(index), {})
    for name, values in objects.items():
        batch.non_tensor_batch[name] = values
    return batch


def read_trajectories(finished: Sequence[FinishedTrajectory]) -> list[Trajectory]:
    """Read finished trajectories with all their tokens from the object store, for a checkpoint."""
    if not finished:
        return []
    batch = join_rows(finished)
    trajectories = trajectories_from_rows(batch.fetch() if isinstance(batch, BatchRef) else batch)
    pairs = zip(trajectories, finished, strict=True)
    return [replace(trajectory, status=header.status, score=header.score) for trajectory, header in pairs]


def store_trajectories(
    trajectories: Sequence[Trajectory], policy: ActorRolloutRefConfig, meta: Mapping[str, Any], use_ray: bool
) -> list[FinishedTrajectory]:
    """Put trajectories of a checkpoint into the object store, as if a host had just finished them. `meta`: the `meta`
    of their job."""
    if not trajectories:
        return []
    job = RolloutJob("restored", meta, sampling_params(policy.rollout, meta), 0, 0)
    rows = job.pack(trajectories, empty_experts(policy.model, policy.rollout))
    objects = rows.pop(non_tensor_batch_keys=list(rows.non_tensor_batch)).non_tensor_batch
    stored, bundle = bundle_rows(rows)
    reply = HostReply(headers=Headers.of(trajectories), objects=objects)
    return finished_trajectories(reply, attach_bundle(stored, ray.put(bundle) if use_ray else bundle))


def _join_objects(name: str, parts: Sequence[RowsPart]) -> np.ndarray:
    """Return an object column of all parts, with None in the rows of parts without this column."""
    columns = [part.objects.get(name, object_array([None] * part.stored.rows)) for part in parts]
    return np.concatenate(columns)
