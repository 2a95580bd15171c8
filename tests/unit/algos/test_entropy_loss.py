"""The entropy bonus by hand."""

import math

import pytest
import torch

from verl.algos import compute_entropy_loss


def test_entropy_by_hand():
    # Uniform over 4 tokens, (3/4, 1/4), and a masked position that holds garbage.
    logits = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [math.log(3), 0.0, -math.inf, -math.inf], [math.nan] * 4]])
    logits.requires_grad_()
    loss = compute_entropy_loss(logits, torch.tensor([[1, 1, 0]]), "token-mean")
    loss.backward()
    entropies = math.log(4), -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert loss.item() == pytest.approx(sum(entropies) / 2)
    assert not logits.grad[0, 2].any()


def test_modes_are_passed_on():
    logits = torch.zeros(2, 3, 4)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    loss = compute_entropy_loss(logits, mask, "seq-mean-token-sum")
    assert loss.item() == pytest.approx((3 + 1) * math.log(4) / 2)
