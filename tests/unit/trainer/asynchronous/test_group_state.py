"""What the stream keeps for a group: how old its answers are, and that it survives a checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto, object_array
from verl.trainer.asynchronous.asked import Asked, ages, asked_for, from_plain, to_plain
from verl.types.request import Output
from verl.types.trajectory import Row, Trajectory, Turn
from verl.utils.plain_store import load_plain, save_plain


def trajectory(number: int, versions: list[int], **extra: Any) -> Trajectory:
    said = Turn("model", [5] * len(versions), [-0.5] * len(versions), versions, "stop")
    row = Row(np.array([1, 2], dtype=np.int64), [said, Turn("environment", [7])])
    return Trajectory("p", number, [row], extra=extra)


def test_a_group_is_as_old_as_its_oldest_known_token():
    steps = {3: 10, 4: 11, 5: 14}
    made = [trajectory(0, [4, 4, 5]), trajectory(1, [5, -1]), trajectory(2, [])]
    assert ages(made, steps, default=9) == (11, 1)
    assert ages([trajectory(0, [2, 5])], steps, default=9) == (9, 1)
    assert ages([trajectory(0, [-1])], steps, default=9) == (9, 0)


def test_what_was_asked_and_answered_survives_a_checkpoint(tmp_path: Path):
    prompt = DataProto.from_dict({"input_ids": torch.tensor([[1, 2]])}, {"uid": object_array(["p"])})
    odd = trajectory(1, [4], tool=object())
    asked = Asked("p~2", prompt, 7, {"p~2/0": trajectory(0, [3, 4], num_turns=2), "p~2/1": odd})
    asked.partials["p~2/2"] = Output([5, 6], [-0.1, -0.2], [3, 4])
    assert not asked.is_plain
    save_plain(to_plain(asked), tmp_path / "asked.pt")
    again = from_plain(load_plain(tmp_path / "asked.pt"))
    assert (again.name, again.step, list(again.made)) == ("p~2", 7, ["p~2/0"]), "what cannot be stored is asked again"
    assert again.prompt.non_tensor_batch["uid"].tolist() == ["p"]
    assert torch.equal(again.prompt.batch["input_ids"], prompt.batch["input_ids"])
    assert asdict(again.partials["p~2/2"]) == asdict(asked.partials["p~2/2"])
    kept, before = again.made["p~2/0"], asked.made["p~2/0"]
    assert (kept.rows[0].turns, kept.extra) == (before.rows[0].turns, before.extra)
    assert kept.rows[0].prompt_ids.tolist() == [1, 2]


def test_an_older_state_says_how_many_answers_it_has():
    known = {"answers to a prompt": 4, "rollout.n": 3}
    groups = {"groups": [{"answers": 2}]}
    assert asked_for({"buffer": groups, "asked_for": known}) == known
    assert asked_for({"buffer": groups}) == {"answers to a prompt": 2}
    assert asked_for({"buffer": {"groups": []}}) == {}


def numbers_by_themselves(value: Any) -> int:
    """How many a copy of it would take one by one."""
    if isinstance(value, dict):
        return sum(map(numbers_by_themselves, value.values()))
    return sum(map(numbers_by_themselves, value)) if isinstance(value, list) else int(isinstance(value, int | float))


def test_training_does_not_wait_while_a_checkpoint_copies_numbers_one_by_one():
    """Answers of 2,000 tokens are the larger part of a state that is copied while training stands still."""
    prompt = DataProto.from_dict({"input_ids": torch.ones(1, 700, dtype=torch.long)}, {"uid": object_array(["p"])})
    long = Turn("model", [5] * 2000, [-0.5] * 2000, [3] * 2000, "length", drawn_log_probs=[-0.5] * 2000)
    asked = Asked("p", prompt, 7, {"p/0": Trajectory("p", 0, [Row([1] * 700, [long])])})
    asked.partials["p/1"] = Output([5] * 2000, [-0.5] * 2000, [3] * 2000, sampled_log_probs=[-0.5] * 2000)
    assert numbers_by_themselves(to_plain(asked)) < 20
