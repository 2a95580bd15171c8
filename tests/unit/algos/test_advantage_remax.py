"""ReMax by hand."""

import pytest
import torch

from verl.algos.advantage.remax import compute_remax_outcome_advantage


def test_remax_by_hand():
    # Token rewards (a KL penalty, say) and a final score; token 1 of the first row is tool output.
    rewards = torch.tensor([[-0.1, 99.0, 1.0], [-0.2, 0.5, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    greedy = torch.tensor([0.6, 1.0])
    advantages, returns = compute_remax_outcome_advantage(rewards, greedy, mask)
    # row 0: -0.1 + 1 = 0.9, then 1.0;   row 1: -0.2 + 0.5 = 0.3, then 0.5
    assert returns.tolist() == [pytest.approx([0.9, 0.0, 1.0]), pytest.approx([0.3, 0.5, 0.0])]
    assert advantages.tolist() == [pytest.approx([0.3, 0.0, 0.4], abs=1e-7), pytest.approx([-0.7, -0.5, 0.0])]
