"""Trajectory: what an answer is, whoever made it: an engine in one turn, or an agent in many. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from verl.types.request import Output

__all__ = ["Row", "Status", "TokenIds", "Trajectory", "Turn"]

TokenIds: TypeAlias = Sequence[int] | np.ndarray
Status: TypeAlias = Literal["finished", "aborted", "failed"]


@dataclass(slots=True)
class Turn:
    """Tokens that stand together in a row and come from one source. Only a model's have log-probs and versions."""

    source: Literal["model", "environment"]
    token_ids: TokenIds
    log_probs: Sequence[float] | np.ndarray | None = None
    """One per token, of the full distribution at the temperature; NaN where it is not known. None: all of them."""
    versions: Sequence[int] | np.ndarray | None = None
    """Of the weights that sampled each token; -1 where it is not known. None: all of them."""
    finish_reason: str | None = None
    """What ended a model's turn: stop, length (it was cut) or abort."""
    reward: float | None = None
    """What this turn earned by itself, besides the trajectory's score."""
    routed_experts: Any = None
    """[tokens, layers, k]: experts that the tokens of the row went through when the token after each was sampled, from
    the row's first token up to this turn's last."""
    drawn_log_probs: Sequence[float] | np.ndarray | None = None
    """Under the distribution really drawn from; 0 where it was greedy."""
    name: str | None = None
    """Who of the environment speaks: the tools that answer, a simulated user. For people."""

    def __post_init__(self) -> None:
        for name in ("log_probs", "versions", "drawn_log_probs"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.token_ids):
                raise ValueError(
                    f"turn: {len(self.token_ids)} tokens and {len(values)} {name}. Give one for each token."
                )

    @classmethod
    def sampled(cls, output: Output) -> Turn:
        """The model's turn that is an engine's answer."""
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
    """One context: a prompt and the turns that were appended to it, none of them changed later."""

    prompt_ids: TokenIds
    turns: list[Turn]
    messages: list[dict[str, Any]] | None = None
    """The row as messages, up to the model's last answer; None unless a reward model scores the run."""

    @property
    def response_length(self) -> int:
        """Tokens of all turns."""
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def finish_reason(self) -> str | None:
        """Of the last model turn."""
        return next((turn.finish_reason for turn in reversed(self.turns) if turn.source == "model"), None)


@dataclass(slots=True)
class Trajectory:
    """One answer to a prompt. It has several rows when its context was rewritten on the way."""

    uid: str
    """The prompt it answers."""
    sample_index: int
    """Which of that prompt's answers."""
    rows: list[Row]
    status: Status = "finished"
    """Aborted ones can be gone on with. Only finished ones are learned from."""
    score: float | None = None
    """None: not scored yet."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What an agent says of it: `num_turns`, `agent_metrics`, and names of its own."""

    @property
    def name(self) -> str:
        """Unique within a batch: what the column `trajectory` holds."""
        return f"{self.uid}/{self.sample_index}"

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions of the weights that sampled its tokens, ascending; unknown ones (-1) are left out."""
        turns = (turn for row in self.rows for turn in row.turns if turn.source == "model")
        sets = (_distinct(turn.versions) for turn in turns if turn.versions is not None)
        return tuple(sorted(version for version in set().union(*sets) if version >= 0))

    @property
    def last_tokens(self) -> np.ndarray:
        """Of its last row's response: what a score is given for."""
        turns = self.rows[-1].turns
        return np.concatenate([np.empty(0, np.int32), *(np.asarray(turn.token_ids, np.int32) for turn in turns)])
