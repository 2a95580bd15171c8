"""The controller's arithmetic: KL in the reward by hand, rewards kept apart, what the reward said by name."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from verl.algos import AdaptiveKLController, FixedKLController
from verl.protocol import DataProto, object_array
from verl.trainer.ppo.advantage import apply_kl_penalty, compute_advantage, trajectory_values


def batch_of(scores: list[float], mask: list[list[int]] | None = None, **columns) -> DataProto:
    """Answers of two tokens, the score on the last one."""
    rows = len(scores)
    tensors = {
        "response_mask": torch.tensor(mask or [[1, 1]] * rows),
        "token_level_scores": torch.tensor([[0.0, score] for score in scores]),
    }
    batch = DataProto.from_dict(tensors)
    batch.non_tensor_batch |= {name: object_array(values) for name, values in columns.items()}
    return batch


def with_log_probs(batch: DataProto, distance: list[list[float]]) -> DataProto:
    """The policy's log-probs lie `distance` above the reference's."""
    batch.batch["ref_log_prob"] = torch.full((len(batch), 2), -1.0)
    batch.batch["old_log_probs"] = torch.tensor(distance) - 1.0
    return batch


def test_the_kl_is_taken_off_token_by_token():
    batch = with_log_probs(batch_of([1.0, 0.0], [[1, 1], [1, 0]]), [[0.2, 0.4], [0.6, math.nan]])
    batch, metrics = apply_kl_penalty(batch, FixedKLController(0.5), "kl")
    # 0 - 0.5 · 0.2,  1 - 0.5 · 0.4;   0 - 0.5 · 0.6,  masked
    assert batch.batch["token_level_rewards"].tolist() == [pytest.approx([-0.1, 0.8]), pytest.approx([-0.3, 0.0])]
    # per sequence (0.2 + 0.4) / 2 = 0.3 and 0.6: 0.45
    assert metrics == {
        "actor/reward_kl_penalty": pytest.approx(0.45),
        "actor/reward_kl_penalty_coeff": 0.5,
    }


def test_rows_that_weigh_nothing_do_not_move_the_controller():
    """KL 0.3 against a target of 0.25: an error of 0.2; one answer over a horizon of 10: × (1 + 0.2 · 1 / 10)."""
    values = []
    for fillers in (0, 3):
        mask = [[1, 1]] + [[0, 0]] * fillers
        batch = with_log_probs(batch_of([1.0] * len(mask), mask), [[0.3, 0.3]] * len(mask))
        controller = AdaptiveKLController(0.1, target_kl=0.25, horizon=10)
        _, metrics = apply_kl_penalty(batch, controller, "kl")
        assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.3)
        values.append(controller.value)
    assert values == pytest.approx([0.1 * 1.02] * 2)


def test_gdpo_keeps_the_rewards_apart_that_the_configuration_names():
    """As in the estimator's case by hand: (right, 100 × format) of two pairs; only the second pair has an advantage."""
    uids = ["a", "a", "b", "b"]
    batch = batch_of([1.0, 0.0, 1.0, 0.0], uid=uids, format=[0.0, 100.0, 100.0, 0.0])
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    config = {"gdpo": {"reward_keys": ["score", "format"]}}
    apart = compute_advantage(batch, "gdpo", config=config).batch["advantages"][:, 0]
    assert apart.tolist() == pytest.approx([0.0, 0.0, math.sqrt(1.5), -math.sqrt(1.5)], abs=1e-5)
    config["gdpo"]["reward_weights"] = [1.0, 0.0]
    first_only = compute_advantage(batch, "gdpo", config=config).batch["advantages"][:, 0]
    one = math.sqrt(0.5) / math.sqrt(2 / 3)
    assert first_only.tolist() == pytest.approx([one, -one, one, -one], abs=1e-5)


def test_what_the_reward_said_by_name():
    batch = batch_of([1.0, 0.5], acc=[np.True_, False], part=[None, math.nan], note=["x", "y"])
    key = "algorithm.gdpo.reward_keys"
    assert trajectory_values(batch, "score", key).tolist() == [1.0, 0.5]
    assert trajectory_values(batch, "acc", key).tolist() == [1.0, 0.0]
    assert trajectory_values(batch, "part", key).tolist() == [0.0, 0.0], "a sample that could not be scored counts 0"
    named_alike = batch_of([1.0, 0.5], acc=[7, 7], reward_acc=[1.0, 0.0])
    assert trajectory_values(named_alike, "acc", key).tolist() == [1.0, 0.0], "the data has a column of the name too"
    for name in ("note", "formt"):
        with pytest.raises(ValueError, match=rf"reward_keys: .*'{name}' \(available: score"):
            trajectory_values(batch, name, key)
