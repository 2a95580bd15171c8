"""Cutting a trajectory into rows changes no token's advantage, whatever the estimator, and no KL in the reward."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algos import AdaptiveKLController
from verl.config import names
from verl.protocol import DataProto, object_array
from verl.trainer.ppo.advantage import apply_kl_penalty, compute_advantage, trajectory_values

LENGTH, TRAJECTORIES = 9, 8
PER_TOKEN = ("token_level_rewards", "token_level_scores", "values", "response_mask", "old_log_probs", "ref_log_prob")
CONFIG = {"gdpo": {"reward_keys": ["score", "format"], "reward_weights": [1.0, 0.5]}}


def whole_batch(seed: int) -> DataProto:
    """Trajectories in uneven groups, in any order, with observations between turns and rewards on any token."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LENGTH + 1, (TRAJECTORIES, 1), generator=rng)
    mask = (torch.arange(LENGTH) < lengths) & (torch.rand(TRAJECTORIES, LENGTH, generator=rng) < 0.8)
    mask[:-1, 0] = True  # the last may have no model token at all
    tensors = {name: torch.randn(TRAJECTORIES, LENGTH, generator=rng, dtype=torch.float64) for name in PER_TOKEN}
    tensors |= {name: torch.randn(TRAJECTORIES, generator=rng, dtype=torch.float64) for name in ("reward_baselines",)}
    batch = DataProto.from_dict(tensors | {"response_mask": mask.long()})
    groups = torch.randint(0, 3, (TRAJECTORIES,), generator=rng).tolist()
    batch.non_tensor_batch |= {
        "uid": object_array([f"prompt-{group}" for group in groups]),
        "format": object_array(torch.rand(TRAJECTORIES, generator=rng).tolist()),
    }
    return batch


def rows_of(batch: DataProto, seed: int) -> tuple[DataProto, list[tuple[int, int, int]]]:
    """The same trajectories in one to three rows each; of every row (trajectory, start, end)."""
    rng = np.random.default_rng(seed)
    spans = []
    for trajectory in range(len(batch)):
        places = sorted(rng.choice(LENGTH - 1, rng.integers(0, 3), replace=False) + 1)
        spans += [(trajectory, int(a), int(b)) for a, b in itertools.pairwise([0, *places, LENGTH])]

    def cut(values: torch.Tensor) -> torch.Tensor:
        rows = values.new_zeros(len(spans), LENGTH)
        for row, (trajectory, start, end) in zip(rows, spans, strict=True):
            row[: end - start] = values[trajectory, start:end]
        return rows

    of_row = [trajectory for trajectory, _, _ in spans]
    tensors = {name: cut(batch.batch[name]) for name in PER_TOKEN}
    tensors["reward_baselines"] = batch.batch["reward_baselines"][of_row]
    rows = DataProto.from_dict(tensors)
    rows.non_tensor_batch |= {name: array[of_row] for name, array in batch.non_tensor_batch.items()}
    rows.non_tensor_batch["trajectory"] = object_array([f"t{number}" for number in of_row])
    return rows, spans


def rejoined(values: torch.Tensor, spans: list[tuple[int, int, int]]) -> torch.Tensor:
    whole = values.new_zeros(TRAJECTORIES, LENGTH)
    for row, (trajectory, start, end) in zip(values, spans, strict=True):
        whole[trajectory, start:end] = row[: end - start]
    return whole


@pytest.mark.parametrize("name", names.ADV_ESTIMATORS)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**31))
def test_splitting_a_trajectory_into_rows_changes_no_tokens_advantage(name, seed):
    batch = whole_batch(seed)
    rows, spans = rows_of(batch, seed)
    expected = compute_advantage(batch, name, gamma=0.9, lam=0.8, config=CONFIG).batch
    found = compute_advantage(rows, name, gamma=0.9, lam=0.8, config=CONFIG).batch
    for column in ("advantages", "returns"):
        assert expected[column].any()
        torch.testing.assert_close(rejoined(found[column], spans), expected[column], rtol=1e-9, atol=1e-9)


@settings(max_examples=10)
@given(seed=st.integers(0, 2**31))
def test_the_kl_per_sequence_and_what_the_reward_said_count_trajectories(seed):
    batch = whole_batch(seed)
    rows, _ = rows_of(batch, seed)
    controllers = [AdaptiveKLController(0.1, target_kl=0.5, horizon=100) for _ in range(2)]
    whole_metrics, row_metrics = (
        apply_kl_penalty(data, controller, "low_var_kl")[1]
        for data, controller in zip((batch, rows), controllers, strict=True)
    )
    assert row_metrics == pytest.approx(whole_metrics)
    assert controllers[0].value == pytest.approx(controllers[1].value)
    for name in ("score", "format"):
        torch.testing.assert_close(trajectory_values(rows, name, "key"), trajectory_values(batch, name, "key"))


@pytest.mark.parametrize("name", names.ADV_ESTIMATORS)
def test_rows_that_are_all_masked_have_no_advantage(name):
    """As when no answer of the step could be scored."""
    rows, _ = rows_of(whole_batch(0), 0)
    rows.batch["response_mask"].zero_()
    rows.batch["last_value"] = torch.ones(len(rows))
    rows.non_tensor_batch["finish_reason"] = object_array(["length"] * len(rows))
    found = compute_advantage(rows, name, config=CONFIG).batch
    assert found["advantages"].shape == rows.batch["response_mask"].shape
    assert not found["advantages"].any()
