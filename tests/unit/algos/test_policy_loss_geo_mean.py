"""GMPO by hand: the geometric mean of clipped token ratios."""

import math

import pytest
import torch

from verl.algos.policy_loss.geo_mean import compute_policy_loss_geo_mean


def test_geo_mean_by_hand():
    old = torch.zeros(2, 3, dtype=torch.float64)
    new = torch.tensor([[0.9, -0.9, 0.3], [0.9, -0.9, 7.0]], dtype=torch.float64)
    advantages = torch.tensor([[2.0] * 3, [-1.0] * 3], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    loss, metrics = compute_policy_loss_geo_mean(
        old, new, advantages, mask, "seq-mean-token-mean", {"clip_ratio_low": 0.4, "clip_ratio_high": 0.5}
    )
    # A = 2:  log-ratios 0.9 → 0.5 (clipped above), -0.9 and 0.3 stay: exp((0.5 - 0.9 + 0.3) / 3)
    # A = -1: 0.9 stays, -0.9 → -0.4 (clipped below): exp((0.9 - 0.4) / 2)
    assert loss.item() == pytest.approx((-2 * math.exp(-0.1 / 3) + math.exp(0.25)) / 2)
    assert metrics["clipfrac"].item() == pytest.approx(2 / 5)
