"""REINFORCE++ by hand."""

import math

import pytest
import torch

from verl.algos.advantage.reinforce_plus_plus import compute_reinforce_plus_plus_outcome_advantage


def test_reinforce_plus_plus_by_hand():
    rewards = torch.tensor([[0.0, 50.0, 1.0], [3.0, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1], [1, 0, 0]])
    advantages, returns = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config={"gamma": 0.5})
    # row 0: 0.5 · 1 = 0.5 across the tool output, then 1;   row 1: 3
    assert returns.tolist() == [pytest.approx([0.5, 0.0, 1.0]), pytest.approx([3.0, 0.0, 0.0])]
    # over the three model tokens: mean 1.5, std √((1 + 0.25 + 2.25) / 2) = √1.75
    std = math.sqrt(1.75)
    assert advantages.tolist() == [
        pytest.approx([-1.0 / std, 0.0, -0.5 / std]),
        pytest.approx([1.5 / std, 0.0, 0.0]),
    ]


def test_gamma_comes_from_the_argument_then_the_configuration():
    rewards, mask = torch.tensor([[0.0, 1.0]]), torch.ones(1, 2)
    _, given = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, {"gamma": 0.5}, gamma=0.25)
    _, configured = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, {"gamma": 0.5})
    _, one = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, {"gamma": 1.0})
    assert (given[0, 0], configured[0, 0], one[0, 0]) == (0.25, 0.5, 1.0)
