"""OPO by hand: the baseline weighs answers by their length."""

import pytest
import torch

from verl.algos.advantage.opo import compute_opo_outcome_advantage


def test_opo_by_hand():
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    advantages, _ = compute_opo_outcome_advantage(rewards, mask, ["a", "a"])
    # baseline (3 · 1 + 1 · 0) / (3 + 1) = 0.75, so 0.25 and -0.75
    assert advantages.tolist() == [pytest.approx([0.25, 0.25, 0.25]), pytest.approx([-0.75, 0.0, 0.0])]


def test_length_counts_model_tokens_only():
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    advantages, _ = compute_opo_outcome_advantage(rewards, mask, ["a", "a"])
    # both have two model tokens: baseline 0.5
    assert advantages.tolist() == [pytest.approx([0.5, 0.0, 0.5]), pytest.approx([-0.5, -0.5, 0.0])]
