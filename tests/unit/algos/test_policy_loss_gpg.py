"""GPG's loss by hand."""

import pytest
import torch

from verl.algos.policy_loss.gpg import compute_policy_loss_gpg


def test_gpg_by_hand():
    log_prob = torch.tensor([[-1.0, -0.5], [-2.0, -9.0]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, 1.0], [-0.5, -0.5]], dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 0]])
    loss, metrics = compute_policy_loss_gpg(log_prob - 0.25, log_prob, advantages, mask, "token-mean")
    # (1 · 1 + 1 · 0.5 - 0.5 · 2) / 3
    assert loss.item() == pytest.approx(0.5 / 3)
    assert metrics["approx_kl"].item() == pytest.approx(-0.25)
