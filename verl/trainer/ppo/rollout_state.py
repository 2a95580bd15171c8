"""State that the RolloutManager keeps: jobs, their unfinished rows, and the hosts that generate them."""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from verl.protocol import DataProto
from verl.single_controller.base.handle import RankHandle
from verl.trainer.ppo.finished_rows import FinishedTrajectory
from verl.types.request import Output
from verl.workers.rollout.partial_outputs import join_outputs

__all__ = ["HostLoss", "HostState", "Kind", "ManagedJob", "OnFinished", "SubmittedRow", "trajectory_names"]

Kind = Literal["engine", "agent"]


OnFinished = Callable[[Sequence[FinishedTrajectory]], None]
"""Called by the collector thread of a host."""


@dataclass(slots=True, eq=False)
class SubmittedRow:
    """A submitted row that has not finished."""

    batch: DataProto
    """The submitted batch; this row is at `index`."""
    index: int
    prompt_length: int
    kind: Kind
    parts: list[Output] = field(default_factory=list)
    """Consecutive parts of its output, as reported. Joining them with every report would cost their whole length."""
    host: HostState | None = None
    """None: not sent yet, or its host was lost."""

    @property
    def partial(self) -> Output | None:
        return join_outputs(list(self.parts), self.prompt_length) if self.parts else None


@dataclass(slots=True, eq=False)
class ManagedJob:
    name: str
    meta: Mapping[str, Any]
    on_finished: OnFinished
    rows: dict[str, SubmittedRow] = field(default_factory=dict)
    inbox: queue.SimpleQueue[list[FinishedTrajectory] | HostLoss] = field(default_factory=queue.SimpleQueue)


@dataclass(slots=True, eq=False)
class HostState:
    kind: Kind
    handle: RankHandle
    id: str
    closed: bool = True
    """No thread collects from it: not started yet, lost, or closed."""
    pulses: int = 0
    """Progress counter of its last reply."""


@dataclass(frozen=True, slots=True, eq=False)
class HostLoss:
    """A host was lost. `error` is None if it reported a lost engine: `require_engines` raises the engine's error."""

    host: HostState
    error: Exception | None


def trajectory_names(rows: DataProto) -> list[str]:
    """The ids of these rows, from their columns `uid` and `sample_index`; ValueError if two rows have the same id."""
    columns = rows.non_tensor_batch
    names = [f"{uid}/{number}" for uid, number in zip(columns["uid"], columns["sample_index"], strict=True)]
    if len(set(names)) < len(names):
        repeated = next(name for name, count in Counter(names).items() if count > 1)
        raise ValueError(f"rollout: several rows are named {repeated!r}. Each needs its own uid or sample_index.")
    return names
