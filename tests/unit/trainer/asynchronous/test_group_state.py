"""GroupState: the age of a group's trajectories, and its round trip through a checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto, object_array
from verl.trainer.asynchronous.group_state import (
    GroupState,
    from_plain,
    group_shape,
    load_buffer,
    oldest_step,
    save_buffer,
    to_plain,
)
from verl.trainer.asynchronous.rollout_buffer import PromptGroup, RolloutBuffer
from verl.types.request import Output
from verl.types.trajectory import Row, Trajectory, Turn
from verl.utils.nested import load_plain, save_plain

PROMPT = DataProto.from_dict({"input_ids": torch.tensor([[1, 2]])}, {"uid": object_array(["p"])})


def trajectory(uid: str, number: int, versions: list[int], **extra: Any) -> Trajectory:
    sampled = Turn("model", [5] * len(versions), [-0.5] * len(versions), versions, "stop")
    row = Row(np.array([1, 2], dtype=np.int64), [sampled, Turn("environment", [7])])
    return Trajectory(uid, number, [row], extra=extra)


def test_a_group_is_as_old_as_its_oldest_known_token():
    steps = {3: 10, 4: 11, 5: 14}
    finished = [trajectory("p", 0, [4, 4, 5]), trajectory("p", 1, [5, -1]), trajectory("p", 2, [])]
    assert [one.versions for one in finished] == [(4, 5), (5,), ()]
    assert oldest_step([one.versions for one in finished], steps, default=9) == (11, 1)
    assert oldest_step([(2, 5)], steps, default=9) == (9, 1)
    assert oldest_step([()], steps, default=9) == (9, 0)


def test_finished_trajectories_and_partial_outputs_survive_a_checkpoint(tmp_path: Path):
    state = GroupState("p~2", PROMPT, 7)
    state.partials["p~2/2"] = Output([5, 6], [-0.1, -0.2], [3, 4])
    before = trajectory("p~2", 0, [3, 4], num_turns=2)
    finished = {before.name: before, "p~2/1": trajectory("p~2", 1, [4], tool=object())}
    save_plain(to_plain(state, finished), tmp_path / "group.pt")
    loaded = from_plain(load_plain(tmp_path / "group.pt"))
    assert (loaded.name, loaded.step) == ("p~2", 7)
    assert list(loaded.finished) == ["p~2/0"], "a trajectory that cannot be stored is generated again"
    assert loaded.prompt.non_tensor_batch["uid"].tolist() == ["p"]
    assert torch.equal(loaded.prompt.batch["input_ids"], PROMPT.batch["input_ids"])
    assert asdict(loaded.partials["p~2/2"]) == asdict(state.partials["p~2/2"])
    after = loaded.finished["p~2/0"]
    assert (after.rows[0].turns, after.extra) == (before.rows[0].turns, before.extra)
    assert after.rows[0].prompt_ids.tolist() == [1, 2]


def test_a_finished_group_with_a_trajectory_that_cannot_be_stored_is_in_flight_again(tmp_path: Path):
    buffer = RolloutBuffer(groups_per_batch=2, max_staleness=2, strategy="drop")
    for serial, tool in enumerate(["plain", object()]):
        group = PromptGroup(serial, f"p{serial}", 1, 3, state=GroupState(f"p{serial}", PROMPT, 4))
        buffer.add(group)
        finished = trajectory(group.uid, 0, [3], tool=tool)
        group.state.finished[finished.name] = finished
        buffer.mark_finished(group, 3, 0)
    save_plain(save_buffer(buffer, lambda finished: finished), tmp_path / "buffer.pt")
    loaded = RolloutBuffer(groups_per_batch=2, max_staleness=2, strategy="drop")
    load_buffer(loaded, load_plain(tmp_path / "buffer.pt"))
    assert [(group.uid, list(group.state.finished)) for group in loaded.finished_groups()] == [("p0", ["p0/0"])]
    assert [(group.uid, list(group.state.finished)) for group in loaded.in_flight()] == [("p1", [])]


def test_an_older_state_has_only_the_number_of_responses():
    shape = {"answers to a prompt": 4, "rollout.n": 3}
    groups = {"groups": [{"answers": 2}]}
    assert group_shape({"buffer": groups, "asked_for": shape}) == shape
    assert group_shape({"buffer": groups}) == {"answers to a prompt": 2}
    assert group_shape({"buffer": {"groups": []}}) == {}


def count_plain_numbers(value: Any) -> int:
    """Numbers that a copy of the value would copy one by one."""
    if isinstance(value, dict):
        return sum(map(count_plain_numbers, value.values()))
    return sum(map(count_plain_numbers, value)) if isinstance(value, list) else int(isinstance(value, int | float))


def test_a_checkpoint_stores_tokens_as_arrays():
    """The state is copied while training waits, and most of it are responses of thousands of tokens."""
    prompt = DataProto.from_dict({"input_ids": torch.ones(1, 700, dtype=torch.long)}, {"uid": object_array(["p"])})
    long = Turn("model", [5] * 2000, [-0.5] * 2000, [3] * 2000, "length", drawn_log_probs=[-0.5] * 2000)
    state = GroupState("p", prompt, 7)
    state.partials["p/1"] = Output([5] * 2000, [-0.5] * 2000, [3] * 2000, sampled_log_probs=[-0.5] * 2000)
    finished = {"p/0": Trajectory("p", 0, [Row([1] * 700, [long])])}
    assert count_plain_numbers(to_plain(state, finished)) < 20
