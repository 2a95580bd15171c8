"""Finished trajectories on the controller: headers and references to rows, joined to batches without copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray

from verl.config import ActorRolloutRefConfig
from verl.protocol import DataProto, object_array
from verl.single_controller.ray.batch_ref import BatchRef
from verl.single_controller.ray.stored import (
    StoredRows,
    bundle_rows,
    concat_columns,
    read_columns,
    take_rows,
    with_bundle,
)
from verl.types.rollout import Headers, HostReply
from verl.types.trajectory import Status, Trajectory
from verl.workers.rollout.loop_host import RolloutJob
from verl.workers.rollout.output import empty_experts, trajectories_from_rows
from verl.workers.rollout.prompts import sampling_params

__all__ = ["FinishedTrajectory", "finished_trajectories", "join_rows", "read_trajectories", "store_trajectories"]

# The batch has these columns already, from its prompts.
_OWN = ("uid", "sample_index")


@dataclass(frozen=True, slots=True, eq=False)
class RowsPart:
    """The rows of trajectories that a host reported together."""

    stored: StoredRows
    """Tensor columns, in the object store."""
    objects: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class FinishedTrajectory:
    """Header of a finished trajectory, and where its rows are."""

    name: str
    uid: str
    sample_index: int
    status: Status
    score: float | None
    """The agent's score; None: not scored."""
    versions: tuple[int, ...]
    """Versions of the weights that sampled its tokens."""
    last_tokens: np.ndarray
    """Response tokens of its last row: what a score is given for."""
    part: RowsPart
    first_row: int
    row_count: int


def finished_trajectories(reply: HostReply, rows: StoredRows) -> list[FinishedTrajectory]:
    """The trajectories of a host's reply; `rows` are their tensor columns."""
    headers = reply.headers
    assert headers is not None
    part = RowsPart(rows, {name: values for name, values in reply.objects.items() if name not in _OWN})
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
    """The training rows of these trajectories, in order. On Ray, tensor columns stay in the object store."""
    parts = list({id(one.part): one.part for one in finished}.values())
    starts = np.cumsum([0, *(part.stored.rows for part in parts)])
    first = {id(part): int(start) for part, start in zip(parts, starts[:-1], strict=True)}
    spans = [(first[id(one.part)] + one.first_row, one.row_count) for one in finished]
    index = np.concatenate([np.arange(start, start + count) for start, count in spans])
    columns = take_rows(concat_columns([part.stored.columns for part in parts]), index)
    objects = {name: _join_objects(name, parts)[index] for name in parts[0].objects}
    if isinstance(next(iter(columns.values())).refs[0].bundle, dict):  # without Ray they are in this process
        return DataProto.from_dict(read_columns(columns), objects)
    batch = BatchRef(columns, len(index), {})
    for name, values in objects.items():
        batch.non_tensor_batch[name] = values
    return batch


def read_trajectories(finished: Sequence[FinishedTrajectory]) -> list[Trajectory]:
    """Finished trajectories with all their tokens, read from the object store: for checkpoints."""
    if not finished:
        return []
    batch = join_rows(finished)
    rows = trajectories_from_rows(batch.fetch() if isinstance(batch, BatchRef) else batch)
    return [replace(row, status=one.status, score=one.score) for row, one in zip(rows, finished, strict=True)]


def store_trajectories(
    trajectories: Sequence[Trajectory], policy: ActorRolloutRefConfig, meta: Mapping[str, Any], use_ray: bool
) -> list[FinishedTrajectory]:
    """Trajectories of a checkpoint as if a host had just finished them; `meta` is that of their job."""
    if not trajectories:
        return []
    job = RolloutJob("restored", meta, sampling_params(policy.rollout, meta), 0, 0)
    rows = job.pack(trajectories, empty_experts(policy.model, policy.rollout))
    objects = rows.pop(non_tensor_batch_keys=list(rows.non_tensor_batch)).non_tensor_batch
    stored, bundle = bundle_rows(rows)
    reply = HostReply("", headers=Headers.of(trajectories), objects=objects)
    return finished_trajectories(reply, with_bundle(stored, ray.put(bundle) if use_ray else bundle))


def _join_objects(name: str, parts: Sequence[RowsPart]) -> np.ndarray:
    """An object column of all parts; None where a part does not have it."""
    columns = [part.objects.get(name, object_array([None] * part.stored.rows)) for part in parts]
    return np.concatenate(columns)
