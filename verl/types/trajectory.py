"""Trajectory: one response to a prompt, from an engine (one turn) or an agent (several turns); HostReply: finished
trajectories from a rollout host to the RolloutManager. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from verl.types.request import Output

TokenIds: TypeAlias = Sequence[int] | np.ndarray
Status: TypeAlias = Literal["finished", "aborted", "failed"]


@dataclass(slots=True)
class Turn:
    """Consecutive tokens of a row from one source. Only turns of the model have log-probs and versions."""

    source: Literal["model", "environment"]
    token_ids: TokenIds
    log_probs: Sequence[float] | np.ndarray | None = None
    """One per token, under the full distribution at the temperature; NaN: unknown. None: all unknown."""
    versions: Sequence[int] | np.ndarray | None = None
    """Version of the weights that sampled each token; -1: unknown. None: all unknown."""
    finish_reason: str | None = None
    """Finish reason of a model's turn: stop, length (truncated) or abort."""
    reward: float | None = None
    """Reward of this turn, in addition to the trajectory's score."""
    routed_experts: Any = None
    """[tokens, layers, k]: experts of each token in the forward pass that sampled the next token, from the first token
    of the row up to the last of this turn."""
    drawn_log_probs: Sequence[float] | np.ndarray | None = None
    """One per token, under the distribution that was sampled from, after truncation and penalties; 0 if greedy."""
    name: str | None = None
    """Display name of the source in the environment: tools, or a simulated user."""

    def __post_init__(self) -> None:
        for name in ("log_probs", "versions", "drawn_log_probs"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.token_ids):
                raise ValueError(
                    f"turn: {len(self.token_ids)} tokens and {len(values)} {name}. Pass one for each token."
                )

    @classmethod
    def sampled(cls, output: Output) -> Turn:
        """The model turn of an engine's output."""
        return cls(
            "model",
            output.token_ids,
            output.log_probs,
            output.versions,
            output.finish_reason,
            routed_experts=output.routed_experts,
            drawn_log_probs=output.sampled_log_probs or None,
        )


def _distinct(versions: Sequence[int] | np.ndarray) -> set[int]:
    if isinstance(versions, np.ndarray):
        same = len(versions) > 0 and bool((versions == versions[0]).all())
        return {int(versions[0])} if same else set(np.unique(versions).tolist())
    return set(versions)


@dataclass(slots=True)
class Row:
    """One context: a prompt and the turns appended to it. Turns are never changed: a rewritten context is a new row."""

    prompt_ids: TokenIds
    turns: list[Turn]
    messages: list[dict[str, Any]] | None = None
    """The row as chat messages, up to the model's last response; None unless a reward model scores the run."""

    @property
    def response_length(self) -> int:
        """Number of tokens of all turns."""
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def finish_reason(self) -> str | None:
        """Finish reason of the last model turn."""
        return next((turn.finish_reason for turn in reversed(self.turns) if turn.source == "model"), None)


@dataclass(slots=True)
class Trajectory:
    """One response to a prompt. It has several rows if an agent rewrote its context."""

    uid: str
    """Id of the prompt."""
    sample_index: int
    """Number among the responses to the prompt."""
    rows: list[Row]
    status: Status = "finished"
    """Aborted trajectories can be resumed. Only finished ones are trained on."""
    score: float | None = None
    """None: not scored yet."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields set by agents: `num_turns`, `agent_metrics`, and `extra_fields` of their outputs."""

    @property
    def name(self) -> str:
        """Unique within a batch: the value of the column `trajectory`."""
        return f"{self.uid}/{self.sample_index}"

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions of the weights that sampled its tokens, ascending, without unknown ones (-1)."""
        turns = (turn for row in self.rows for turn in row.turns if turn.source == "model")
        sets = (_distinct(turn.versions) for turn in turns if turn.versions is not None)
        return tuple(sorted(version for version in set().union(*sets) if version >= 0))

    @property
    def last_tokens(self) -> np.ndarray:
        """Response tokens of the last row: the input of reward functions."""
        turns = self.rows[-1].turns
        return np.concatenate([np.empty(0, np.int32), *(np.asarray(turn.token_ids, np.int32) for turn in turns)])


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
    """Reply of a rollout host (`LoopHost`) to `collect`. The tensor columns of finished rows are returned beside it."""

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
