"""GAE by hand, with an observation between two turns."""

import math

import pytest
import torch

from verl.algos.advantage.gae import compute_gae_advantage_return

NAN = float("nan")


def test_gae_by_hand():
    # Tokens 0, 1 and 3 are the model's; token 2 is tool output and holds garbage.
    rewards = torch.tensor([[0.0, 0.0, NAN, 1.0]], dtype=torch.float64)
    values = torch.tensor([[0.5, 0.4, NAN, 0.2]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 1]])
    advantages, returns = compute_gae_advantage_return(rewards, values, mask, gamma=0.9, lam=0.5)

    # δ3 = 1 - 0.2 = 0.8                A3 = 0.8                            R3 = 0.8 + 0.2 = 1.0
    # δ1 = 0.9 · 0.2 - 0.4 = -0.22      A1 = -0.22 + 0.45 · 0.8 = 0.14      R1 = 0.14 + 0.4 = 0.54
    # δ0 = 0.9 · 0.4 - 0.5 = -0.14      A0 = -0.14 + 0.45 · 0.14 = -0.077   R0 = -0.077 + 0.5 = 0.423
    assert returns.tolist() == [pytest.approx([0.423, 0.54, 0.0, 1.0])]
    mean = (-0.077 + 0.14 + 0.8) / 3
    std = math.sqrt(((-0.077 - mean) ** 2 + (0.14 - mean) ** 2 + (0.8 - mean) ** 2) / 2)
    expected = [(-0.077 - mean) / std, (0.14 - mean) / std, 0.0, (0.8 - mean) / std]
    assert advantages.tolist() == [pytest.approx(expected)]


def test_lambda_one_makes_the_returns_the_discounted_rewards_whatever_the_critic_says():
    rewards = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64)
    values = torch.tensor([[3.0, -7.0, 0.1]], dtype=torch.float64)
    _, returns = compute_gae_advantage_return(rewards, values, torch.ones(1, 3), gamma=0.5, lam=1.0)
    # 1 + 0.5 · 2 + 0.25 · 4 = 3, 2 + 0.5 · 4 = 4, 4
    assert returns.tolist() == [pytest.approx([3.0, 4.0, 4.0])]


def test_lambda_zero_makes_the_returns_one_step_predictions():
    rewards = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64)
    values = torch.tensor([[3.0, -7.0, 0.1]], dtype=torch.float64)
    _, returns = compute_gae_advantage_return(rewards, values, torch.ones(1, 3), gamma=0.5, lam=0.0)
    # r_t + 0.5 · V_next
    assert returns.tolist() == [pytest.approx([1 - 3.5, 2 + 0.05, 4.0])]


def test_an_answer_that_was_cut_goes_on_with_the_critics_value():
    """δ = r + γ V_next - V by hand, with γ = 0.5, λ = 1: the last token's next value is the one after the answer.

    The second row's last model token stands before padding; the third has none, and the fourth was not cut.
    """
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0], [1, 1, 0]])
    values, rewards = torch.full((4, 3), 2.0), torch.zeros(4, 3)
    _, returns = compute_gae_advantage_return(
        rewards, values, mask, gamma=0.5, lam=1.0, last_value=torch.tensor([8.0, 4.0, 9.0, 0.0])
    )
    assert returns.tolist() == [[1.0, 2.0, 4.0], [1.0, 2.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
