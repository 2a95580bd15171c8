"""What a rollout host reports to the rollout manager. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from verl.types.request import Output
from verl.types.trajectory import Status, Trajectory

__all__ = ["Headers", "HostReply"]


@dataclass(frozen=True, slots=True)
class Headers:
    """Finished trajectories without their large columns; one entry per trajectory in each field."""

    names: list[str]
    """`Trajectory.name`: uid and sample index."""
    uids: list[str]
    sample_indices: np.ndarray
    statuses: list[Status]
    scores: list[float | None]
    """Scores that agents gave; None: not scored."""
    row_counts: np.ndarray
    """Rows of each trajectory in the batch of rows that comes with the headers; they stand together, in order."""
    versions: list[tuple[int, ...]]
    """Versions of the weights that sampled tokens of the trajectory, ascending."""
    tokens: np.ndarray
    """int32: response tokens of each trajectory's last row, one trajectory after the other."""
    token_offsets: np.ndarray
    """[trajectories + 1]: where the tokens of each begin."""

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
    """One reply of a host to `collect`; the tensor columns of the finished rows come beside it."""

    host: str
    """Id of the host: a process that was restarted has another one."""
    job: str | None = None
    """The job that the headers belong to; None: nothing finished."""
    headers: Headers | None = None
    objects: dict[str, np.ndarray] = field(default_factory=dict)
    """Object columns of the finished rows."""
    partials: dict[str, dict[str, Output]] = field(default_factory=dict)
    """By job and trajectory: tokens sampled since the last report, of trajectories in their first model call."""
    failure: str | None = None
    """Why this host cannot finish its rows: its engine failed."""
    lost_replica: str | None = None
    """Why an engine replica was lost, reported once; its requests wait for `renew_replicas`."""
    closed: bool = False
    """The host was closed: no further replies have content."""
    pulses: int = 0
    """A number that changes as long as the host's process makes progress."""
