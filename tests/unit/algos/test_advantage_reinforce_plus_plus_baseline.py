"""REINFORCE++ with the group's mean as baseline, by hand."""

import math

import pytest
import torch

from verl.algos.advantage.reinforce_plus_plus_baseline import compute_reinforce_plus_plus_baseline_outcome_advantage


def test_reinforce_plus_plus_baseline_by_hand():
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 5.0], [3.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 0], [1, 0], [1, 1], [1, 0]])
    advantages, _ = compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, ["a", "a", "b", "b"])
    # minus the group means 0.5 and 4: 0.5, -0.5, then 1, 1 (two tokens), -1
    # over the five model tokens: mean 1 / 5 = 0.2, squares 0.25 + 0.25 + 1 + 1 + 1 = 3.5, std √((3.5 - 5 · 0.04) / 4)
    std = math.sqrt((3.5 - 5 * 0.04) / 4)
    expected = [[0.3 / std, 0.0], [-0.7 / std, 0.0], [0.8 / std, 0.8 / std], [-1.2 / std, 0.0]]
    assert advantages.tolist() == [pytest.approx(row) for row in expected]
