"""GSPO by hand: one ratio per sequence."""

import math

import pytest
import torch

from verl.algos.policy_loss.gspo import compute_policy_loss_gspo


def test_gspo_by_hand():
    old = torch.zeros(2, 3, dtype=torch.float64)
    new = torch.tensor([[0.3, 0.1, 0.2], [-0.5, -0.3, 9.9]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    advantages = torch.tensor([[1.0] * 3, [-1.0] * 3], dtype=torch.float64)
    loss, metrics = compute_policy_loss_gspo(
        old, new, advantages, mask, "seq-mean-token-mean", {"clip_ratio_low": 0.5, "clip_ratio_high": 0.1}
    )
    # s = exp((0.3 + 0.1 + 0.2) / 3) = e^0.2 = 1.22, clipped to 1.1: loss -1.1
    # s = exp((-0.5 - 0.3) / 2) = e^-0.4 = 0.67, within 0.5: loss 0.67
    assert loss.item() == pytest.approx((-1.1 + math.exp(-0.4)) / 2)
    assert metrics["clipfrac"].item() == pytest.approx(3 / 5)
    assert metrics["sequence_ratio"].item() == pytest.approx((3 * math.exp(0.2) + 2 * math.exp(-0.4)) / 5)


def test_with_one_advantage_per_sequence_the_token_form_has_the_gradient_of_the_sequence_form():
    generator = torch.Generator().manual_seed(0)
    old, new = (torch.randn(3, 4, generator=generator, dtype=torch.float64) * 0.1 for _ in range(2))
    advantages = torch.randn(3, 1, generator=generator, dtype=torch.float64).expand(3, 4)
    gradients = []
    for form in ("token", "sequence"):
        log_prob = new.clone().requires_grad_()
        if form == "token":
            loss, _ = compute_policy_loss_gspo(old, log_prob, advantages, torch.ones(3, 4), config={"clip_ratio": 5.0})
        else:
            loss = -(advantages[:, 0] * (log_prob - old).mean(-1).exp()).mean()
        loss.backward()
        gradients.append(log_prob.grad)
    torch.testing.assert_close(*gradients)
