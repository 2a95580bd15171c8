"""KL-Cov by hand: the tokens of largest covariance are held near the old policy."""

import pytest
import torch

from verl.algos.policy_loss.kl_cov import compute_policy_loss_kl_cov

CONFIG = {"policy_loss": {"loss_mode": "kl_cov", "kl_cov_ratio": 0.25, "ppo_kl_coef": 2.0}}


def test_kl_cov_by_hand():
    old = torch.tensor([[-1.5, -2.0, -3.0, -4.0]], dtype=torch.float64)
    new = torch.tensor([[-1.0, -2.0, -3.0, -4.0]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[3.0, 1.0, -1.0, 1.0]], dtype=torch.float64)
    loss, metrics = compute_policy_loss_kl_cov(old, new, advantages, torch.ones(1, 4), "token-sum", CONFIG)
    loss.backward()
    # Means -2.5 and 1: covariances 3, 0, 1, 0, so the first token (of four, a share of 0.25) is held.
    ratio = torch.tensor(0.5).exp().item()
    # -3 e^0.5 + 2 · 0.5 on the first, -1 + 1 - 1 on the others, whose ratio is 1
    assert loss.item() == pytest.approx(-3 * ratio + 1.0 - 1.0)
    # the penalty adds 2 · sign(0.5) to the first gradient
    assert new.grad.tolist() == [pytest.approx([-3 * ratio + 2.0, -1.0, 1.0, -1.0])]
    assert metrics["kl_cov_fraction"].item() == pytest.approx(0.25)


def test_masked_tokens_are_never_held():
    old = torch.zeros(1, 3, dtype=torch.float64)
    new = torch.tensor([[0.5, 0.5, 0.5]], dtype=torch.float64)
    advantages = torch.tensor([[-5.0, -5.0, 50.0]], dtype=torch.float64)
    config = {"policy_loss": {"loss_mode": "kl_cov", "kl_cov_ratio": 1.0, "ppo_kl_coef": 2.0}}
    _, metrics = compute_policy_loss_kl_cov(old, new, advantages, torch.tensor([[1, 1, 0]]), "token-sum", config)
    assert metrics["kl_cov_fraction"].item() == 1.0
