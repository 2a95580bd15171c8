"""GroupState: data of a prompt group (prompt, finished trajectories, partial outputs), and its checkpoint format, which
stores trajectories, turns and outputs by field name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any

import numpy as np

from verl.protocol import DataProto
from verl.trainer.asynchronous.rollout_buffer import RolloutBuffer
from verl.trainer.ppo.row_balancing import concat_prompts
from verl.types.request import Output
from verl.types.trajectory import Row, Trajectory, Turn
from verl.utils.nested import is_plain

_BY_TOKEN = {
    "token_ids": np.int64,
    "log_probs": np.float64,
    "versions": np.int64,
    "drawn_log_probs": np.float64,
    "raw_log_probs": np.float64,
    "sampled_log_probs": np.float64,
}
"""Fields of turns and outputs that have one number per token."""


@dataclass(slots=True)
class GroupState:
    """Data that the GroupStream stores for one group (`PromptGroup.state`)."""

    name: str
    """The `uid` of its rows. Unique among live groups and dropped groups whose results may still arrive."""
    source: DataProto
    """A batch of prompts from the dataset; the group's prompt is at `row`."""
    step: int
    """The step in which it was first submitted. Determines its sampling noise, also after a resubmission."""
    finished: dict[str, Any] = field(default_factory=dict)
    """Its finished trajectories by name: `FinishedTrajectory`, or `Trajectory` after `from_plain`."""
    partials: dict[str, Output] = field(default_factory=dict)
    """Partial outputs of its unfinished trajectories by name, at the last checkpoint."""
    scorer: Any = None
    """Scorer of its trajectories (`Generator.early_scorer`); None: they are scored with the batch."""
    row: int = 0

    @property
    def prompt(self) -> DataProto:
        """The prompt of the group, as a batch of one row."""
        return self.source[self.row : self.row + 1]

    def trajectory_names(self, count: int) -> list[str]:
        """Return the names of its `count` trajectories."""
        return [f"{self.name}/{number}" for number in range(count)]


def join_prompts(states: Sequence[GroupState]) -> DataProto:
    """Return the prompts of these groups, in order. Adjacent groups with the same source are selected at once."""
    parts = []
    for _, run in groupby(states, key=lambda state: id(state.source)):
        adjacent = list(run)
        parts.append(adjacent[0].source.select_idxs(np.array([state.row for state in adjacent])))
    return concat_prompts(parts)


def oldest_step(versions: Iterable[Sequence[int]], steps: Mapping[int, int], default: int) -> tuple[int, int]:
    """Return the step at which the oldest token was sampled, and the number of partial rollouts: trajectories with
    tokens of several weight versions.

    `versions`: weight versions of each trajectory. `steps`: by weight version, the last step at which the rollout had
    it. `default`: the step of other versions.
    """
    distinct = [set(of_trajectory) for of_trajectory in versions]
    oldest = min((steps.get(version, default) for version in set().union(*distinct)), default=default)
    return oldest, sum(len(of_trajectory) > 1 for of_trajectory in distinct)


def to_plain(state: GroupState, trajectories: Mapping[str, Trajectory]) -> dict[str, Any]:
    """Return the state as plain data, for a checkpoint. `trajectories`: finished trajectories by name. If one cannot be
    stored, it is left out and generated again after a restart."""
    prompt = state.prompt
    return {
        "name": state.name,
        "prompt": {"tensors": dict(prompt.batch.items()), "arrays": dict(prompt.non_tensor_batch)},
        "step": state.step,
        "made": {name: _packed_trajectory(item) for name, item in trajectories.items() if _is_plain(item)},
        "partials": {name: _packed(output) for name, output in state.partials.items()},
    }


def from_plain(saved: Mapping[str, Any]) -> GroupState:
    """Restore a state from the result of `to_plain`."""
    return GroupState(
        saved["name"],
        _prompt(saved),
        int(saved["step"]),
        {name: _unpacked_trajectory(item) for name, item in saved["made"].items()},
        {name: Output(**_unpacked(output)) for name, output in saved["partials"].items()},
    )


def save_buffer(buffer: RolloutBuffer, read: Callable[[list[Any]], list[Trajectory]]) -> dict[str, Any]:
    """Return the state of a buffer and its groups' states as plain data. `read(finished)` reads finished trajectories
    from the object store."""
    saved = buffer.state()
    finished = [header for group in saved["groups"] for header in group["rows"].finished.values()]
    by_name = dict(zip((header.name for header in finished), read(finished), strict=True))
    storable = {
        group.serial
        for group in buffer.finished_groups()
        if all(_is_plain(by_name[name]) for name in group.state.finished)
    }
    saved["finished"] = [serial for serial in saved["finished"] if serial in storable]
    saved["groups"] = [
        group | {"rows": to_plain(group["rows"], {name: by_name[name] for name in group["rows"].finished})}
        for group in saved["groups"]
    ]
    return saved


def load_buffer(buffer: RolloutBuffer, saved: Mapping[str, Any]) -> None:
    """Restore a buffer from `save_buffer`; the finished trajectories of its groups are `Trajectory` objects."""
    groups = [group | {"rows": from_plain(group["rows"])} for group in saved["groups"]]
    buffer.load({**saved, "groups": groups})


def group_shape(state: Mapping[str, Any]) -> dict[str, int]:
    """Return the settings of the groups in a saved stream (`GroupStream._group_shape`). Old checkpoints contain only
    the number of responses per prompt."""
    if (settings := state.get("asked_for")) is not None:
        return dict(settings)
    groups = state["buffer"]["groups"]
    return {"answers to a prompt": groups[0]["answers"]} if groups else {}


def saved_prompts(state: Mapping[str, Any]) -> list[DataProto]:
    """Return the prompts of all groups in a saved stream, in order, for runs that cannot use its responses."""
    return [_prompt(group["rows"]) for group in state["buffer"]["groups"]]


def _prompt(saved: Mapping[str, Any]) -> DataProto:
    return DataProto.from_dict(saved["prompt"]["tensors"], saved["prompt"]["arrays"])


def _is_plain(trajectory: Trajectory) -> bool:
    """Return whether a trajectory can be stored: agents may return objects that cannot be serialized."""
    return is_plain(trajectory.extra) and all(is_plain(row.messages) for row in trajectory.rows)


def _packed_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    rows = [
        {
            "prompt_ids": np.asarray(row.prompt_ids),
            "turns": [_packed(turn) for turn in row.turns],
            "messages": row.messages,
        }
        for row in trajectory.rows
    ]
    return {**_fields(trajectory), "rows": rows}


def _unpacked_trajectory(saved: Mapping[str, Any]) -> Trajectory:
    rows = [
        Row(row["prompt_ids"], [Turn(**_unpacked(turn)) for turn in row["turns"]], row.get("messages"))
        for row in saved["rows"]
    ]
    return Trajectory(**{**saved, "rows": rows})


def _packed(item: Turn | Output) -> dict[str, Any]:
    """Return the fields by name, with per-token lists as arrays, which are faster to copy: saving blocks training."""
    values = _fields(item)
    return values | {
        name: np.asarray(values[name], dtype)
        for name, dtype in _BY_TOKEN.items()
        if isinstance(values.get(name), list) and values[name]
    }


def _unpacked(saved: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.tolist() if name in _BY_TOKEN and isinstance(value, np.ndarray) else value
        for name, value in saved.items()
    }


def _fields(item: Any) -> dict[str, Any]:
    """Like `dataclasses.asdict`, but without a deep copy."""
    return {item_field.name: getattr(item, item_field.name) for item_field in fields(item)}
