"""Asked: what the stream keeps for a prompt group: its prompt, its answers so far, and both as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from verl.protocol import DataProto
from verl.trainer.asynchronous.buffer import Buffer
from verl.types.request import Output
from verl.types.trajectory import Row, Trajectory, Turn
from verl.utils.plain_store import is_plain

__all__ = ["Asked", "ages", "asked_for", "from_plain", "prompts_of", "restore", "stored", "to_plain"]

_BY_TOKEN = {
    "token_ids": np.int64,
    "log_probs": np.float64,
    "versions": np.int64,
    "drawn_log_probs": np.float64,
    "raw_log_probs": np.float64,
    "sampled_log_probs": np.float64,
}
"""Fields of turns and outputs that have a number for each token."""


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
        return all(map(_is_plain, self.made.values()))


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
        "made": {name: _trajectory_data(one) for name, one in asked.made.items() if _is_plain(one)},
        "partials": {name: _packed(output) for name, output in asked.partials.items()},
    }


def from_plain(saved: Mapping[str, Any]) -> Asked:
    """What `to_plain` was given."""
    return Asked(
        saved["name"],
        _prompt(saved),
        int(saved["step"]),
        {name: _trajectory(one) for name, one in saved["made"].items()},
        {name: Output(**_unpacked(output)) for name, output in saved["partials"].items()},
    )


def stored(buffer: Buffer) -> dict[str, Any]:
    """A buffer whose groups hold what was asked, for a checkpoint."""
    saved = buffer.state()
    whole = {group.serial for group in buffer.ready() if group.rows.is_plain}
    saved["finished"] = [serial for serial in saved["finished"] if serial in whole]
    saved["groups"] = [each | {"rows": to_plain(each["rows"])} for each in saved["groups"]]
    return saved


def restore(buffer: Buffer, saved: Mapping[str, Any]) -> None:
    """Let the buffer go on where `stored` was taken."""
    groups = [each | {"rows": from_plain(each["rows"])} for each in saved["groups"]]
    buffer.load({**saved, "groups": groups})


def asked_for(state: Mapping[str, Any]) -> dict[str, int]:
    """What a stream's saved state says of its groups; an older one says how many answers they have."""
    if (known := state.get("asked_for")) is not None:
        return dict(known)
    groups = state["buffer"]["groups"]
    return {"answers to a prompt": groups[0]["answers"]} if groups else {}


def prompts_of(state: Mapping[str, Any]) -> list[DataProto]:
    """The prompts of all groups in a stream's saved state, in their order: for a run without one."""
    return [_prompt(each["rows"]) for each in state["buffer"]["groups"]]


def _prompt(saved: Mapping[str, Any]) -> DataProto:
    return DataProto.from_dict(saved["prompt"]["tensors"], saved["prompt"]["arrays"])


def _is_plain(one: Trajectory) -> bool:
    return is_plain(one.extra) and all(is_plain(row.messages) for row in one.rows)


def _trajectory_data(one: Trajectory) -> dict[str, Any]:
    rows = [
        {
            "prompt_ids": np.asarray(row.prompt_ids),
            "turns": [_packed(turn) for turn in row.turns],
            "messages": row.messages,
        }
        for row in one.rows
    ]
    return {**_fields(one), "rows": rows}


def _trajectory(saved: Mapping[str, Any]) -> Trajectory:
    rows = [
        Row(row["prompt_ids"], [Turn(**_unpacked(turn)) for turn in row["turns"]], row.get("messages"))
        for row in saved["rows"]
    ]
    return Trajectory(**{**saved, "rows": rows})


def _packed(tokens: Turn | Output) -> dict[str, Any]:
    """Its fields; numbers by token as arrays: training stands still while a checkpoint copies them."""
    found = _fields(tokens)
    return found | {
        name: np.asarray(found[name], dtype)
        for name, dtype in _BY_TOKEN.items()
        if isinstance(found.get(name), list) and found[name]
    }


def _unpacked(saved: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.tolist() if name in _BY_TOKEN and isinstance(value, np.ndarray) else value
        for name, value in saved.items()
    }


def _fields(of: Any) -> dict[str, Any]:
    """As `asdict`, which would copy every number of every list."""
    return {each.name: getattr(of, each.name) for each in fields(of)}
