"""SAPO by hand."""

import math

import pytest
import torch

from verl.algos.policy_loss.sapo import compute_policy_loss_sapo

CONFIG = {"policy_loss": {"loss_mode": "sapo", "tau_pos": 1.0, "tau_neg": 2.0}}


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_sapo_by_hand():
    old = torch.zeros(1, 2, dtype=torch.float64)
    new = torch.tensor([[1.5, 0.5]], dtype=torch.float64).log()
    advantages = torch.tensor([[2.0, -3.0]], dtype=torch.float64)
    loss, _ = compute_policy_loss_sapo(old, new, advantages, torch.ones(1, 2), "token-sum", CONFIG)
    # -2 · (4 / 1) σ(1 · 0.5) + 3 · (4 / 2) σ(2 · -0.5)
    assert loss.item() == pytest.approx(-8 * sigmoid(0.5) + 6 * sigmoid(-1.0))


def test_at_ratio_one_the_gradient_is_that_of_the_plain_policy_gradient():
    log_prob = torch.tensor([[-1.0, -0.3]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[2.0, -3.0]], dtype=torch.float64)
    loss, _ = compute_policy_loss_sapo(log_prob.detach(), log_prob, advantages, torch.ones(1, 2), "token-sum", CONFIG)
    loss.backward()
    # 4 / τ · τ · σ'(0) = 4 · 1 / 4 = 1
    assert log_prob.grad.tolist() == [pytest.approx([-2.0, 3.0])]
