"""CISPO by hand: the clipped ratio is a weight, and clipped tokens keep their gradient."""

import pytest
import torch

from verl.algos.policy_loss.cispo import compute_policy_loss_cispo


def test_cispo_by_hand():
    new = torch.tensor([[-1.0, -2.0, -0.5]], dtype=torch.float64, requires_grad=True)
    ratios = torch.tensor([[1.1, 3.0, 0.2]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, 2.0, -1.0]], dtype=torch.float64)
    old = (new - ratios.log()).detach()
    loss, metrics = compute_policy_loss_cispo(
        old, new, advantages, torch.ones(1, 3), "token-sum", {"clip_ratio_low": 0.5, "clip_ratio_high": 0.3}
    )
    loss.backward()
    # weights 1.1, 1.3 (clipped from 3), 0.5 (clipped from 0.2): -1.1 · 1 · -1 - 1.3 · 2 · -2 + 0.5 · -0.5
    assert loss.item() == pytest.approx(1.1 + 5.2 - 0.25)
    # the gradient is -weight · A on every token, clipped or not
    assert new.grad.tolist() == [pytest.approx([-1.1, -2.6, 0.5])]
    assert metrics["clipfrac"].item() == pytest.approx(2 / 3)
