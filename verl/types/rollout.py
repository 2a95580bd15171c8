"""Replies of a rollout host (`LoopHost`) to the RolloutManager. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from verl.types.request import Output
from verl.types.trajectory import Status, Trajectory

__all__ = ["Headers", "HostReply"]


@dataclass(frozen=True, slots=True)
class Headers:
    """Finished trajectories without their rows. Fields have one entry per trajectory, unless stated otherwise."""

    names: list[str]
    """`Trajectory.name`: uid and sample index."""
    uids: list[str]
    sample_indices: np.ndarray
    statuses: list[Status]
    scores: list[float | None]
    """Scores set by agents; None: not scored."""
    row_counts: np.ndarray
    """Number of rows of each trajectory in the batch that accompanies the headers, where they are adjacent and in the
    order of the headers."""
    versions: list[tuple[int, ...]]
    """Versions of the weights that sampled tokens of the trajectory, ascending."""
    tokens: np.ndarray
    """int32, concatenated: response tokens of the last row of each trajectory."""
    token_offsets: np.ndarray
    """[trajectories + 1]: offsets of each trajectory in `tokens`."""

    def last_tokens(self, number: int) -> np.ndarray:
        """Response tokens of the last row of trajectory `number`."""
        return self.tokens[self.token_offsets[number] : self.token_offsets[number + 1]]

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> Headers:
        """The headers of these trajectories."""
        tokens = [trajectory.last_tokens for trajectory in trajectories]
        return cls(
            names=[trajectory.name for trajectory in trajectories],
            uids=[trajectory.uid for trajectory in trajectories],
            sample_indices=np.array([trajectory.sample_index for trajectory in trajectories], np.int64),
            statuses=[trajectory.status for trajectory in trajectories],
            scores=[trajectory.score for trajectory in trajectories],
            row_counts=np.array([len(trajectory.rows) for trajectory in trajectories], np.int64),
            versions=[trajectory.versions for trajectory in trajectories],
            tokens=np.concatenate([np.empty(0, np.int32), *tokens]),
            token_offsets=np.cumsum([0, *map(len, tokens)]),
        )


@dataclass(frozen=True, slots=True)
class HostReply:
    """Reply of a host to `collect`. The tensor columns of finished rows are returned beside it."""

    job: str | None = None
    """The job of the headers; None: no trajectory finished."""
    headers: Headers | None = None
    objects: dict[str, np.ndarray] = field(default_factory=dict)
    """Object columns of the finished rows."""
    partials: dict[str, dict[str, Output]] = field(default_factory=dict)
    """By job and trajectory: tokens sampled since the last report, of trajectories in their first model call."""
    failure: str | None = None
    """Error message of the engine's failure: this host cannot finish its rows."""
    lost_replica: str | None = None
    """From an AgentHost, once per loss: error message of a lost engine replica. Its requests resume on another replica,
    or wait for `AgentHost.renew_replicas`."""
    closed: bool = False
    """The host is closed: later replies are empty."""
    pulses: int = 0
    """Progress counter of the host's process: it changes as long as there is progress."""
