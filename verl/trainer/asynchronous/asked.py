"""Asked: what the stream keeps for a prompt group: its prompt, its answers so far, and both as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from verl.protocol import DataProto
from verl.types.request import Output
from verl.types.trajectory import Row, Trajectory, Turn
from verl.utils.plain_store import is_plain

__all__ = ["Asked", "ages", "from_plain", "prompts_of", "to_plain"]


@dataclass(slots=True)
class Asked:
    """Of one group (`Group.rows`)."""

    name: str
    """The `uid` of its rows: none that is out has the same, nor one whose answers may still come."""
    prompt: DataProto
    """One row, as it came from the data."""
    step: int
    """The step in which it was asked: whose sampling noise it has, also when it is asked again."""
    made: dict[str, Trajectory] = field(default_factory=dict)
    """Its trajectories that have ended, by name."""
    partials: dict[str, Output] = field(default_factory=dict)
    """What there was of other answers when they were last noted."""
    lane: Any = None
    """The loop worker that answers it."""
    ahead: Any = None
    """Where its answers are scored while others are under way, if they are."""

    def trajectories(self, answers: int) -> list[str]:
        """The names of its trajectories."""
        return [f"{self.name}/{number}" for number in range(answers)]

    @property
    def is_plain(self) -> bool:
        """Whether its answers can be stored: agents may say what cannot."""
        return all(is_plain(one.extra) for one in self.made.values())


def ages(made: Iterable[Trajectory], steps: Mapping[int, int], default: int) -> tuple[int, int]:
    """When its oldest token was sampled, and how many trajectories have tokens of several versions of the weights.

    `steps` says when the rollout had each version last.
    """
    versions = [
        {
            version
            for row in one.rows
            for turn in row.turns
            if turn.source == "model" and turn.versions is not None
            for version in set(turn.versions)  # of thousands of tokens a few
            if version >= 0
        }
        for one in made
    ]
    oldest = min((steps.get(version, default) for of_one in versions for version in of_one), default=default)
    return oldest, sum(len(of_one) > 1 for of_one in versions)


def to_plain(asked: Asked) -> dict[str, Any]:
    """For a checkpoint. Answers that cannot be stored are left out: they are asked for again."""
    return {
        "name": asked.name,
        "prompt": {"tensors": dict(asked.prompt.batch.items()), "arrays": dict(asked.prompt.non_tensor_batch)},
        "step": asked.step,
        "made": {name: asdict(one) for name, one in asked.made.items() if is_plain(one.extra)},
        "partials": {name: asdict(output) for name, output in asked.partials.items()},
    }


def from_plain(saved: Mapping[str, Any]) -> Asked:
    """What `to_plain` was given."""
    return Asked(
        saved["name"],
        _prompt(saved),
        int(saved["step"]),
        {name: _trajectory(one) for name, one in saved["made"].items()},
        {name: Output(**output) for name, output in saved["partials"].items()},
    )


def prompts_of(state: Mapping[str, Any]) -> list[DataProto]:
    """The prompts of all groups in a stream's saved state, in their order: for a run without one."""
    return [_prompt(each["rows"]) for each in state["buffer"]["groups"]]


def _prompt(saved: Mapping[str, Any]) -> DataProto:
    return DataProto.from_dict(saved["prompt"]["tensors"], saved["prompt"]["arrays"])


def _trajectory(saved: Mapping[str, Any]) -> Trajectory:
    rows = [Row(row["prompt_ids"], [Turn(**turn) for turn in row["turns"]]) for row in saved["rows"]]
    return Trajectory(**{**saved, "rows": rows})
