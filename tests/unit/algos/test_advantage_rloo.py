"""RLOO by hand."""

import pytest
import torch

from verl.algos.advantage.rloo import compute_rloo_outcome_advantage


def test_rloo_by_hand():
    rewards = torch.tensor([[1.0], [0.0], [5.0], [4.0], [7.0]], dtype=torch.float64)
    advantages, _ = compute_rloo_outcome_advantage(rewards, torch.ones(5, 1), ["a", "a", "b", "a", "b"])
    # a: 1 - (0 + 4) / 2 = -1,  0 - (1 + 4) / 2 = -2.5,  4 - (1 + 0) / 2 = 3.5.   b: 5 - 7 = -2,  7 - 5 = 2
    assert advantages[:, 0].tolist() == pytest.approx([-1.0, -2.5, -2.0, 3.5, 2.0])


def test_a_lone_answer_has_no_others():
    advantages, _ = compute_rloo_outcome_advantage(torch.tensor([[3.0]]), torch.ones(1, 1), ["a"])
    assert advantages.tolist() == [[0.0]]
