"""The value loss and the entropy loss by hand, and their gradients."""

import math

import pytest
import torch

from verl.algos import compute_entropy_loss, compute_value_loss

NAN = float("nan")
PREDICTED = torch.tensor([[1.0, 2.0, 0.0, NAN]], dtype=torch.float64)
BEFORE = torch.tensor([[0.9, 1.0, 1.0, NAN]], dtype=torch.float64)
RETURNS = torch.tensor([[0.0, 2.5, 1.0, NAN]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 0]])
# errors 1, 0.25 and 1; held within 0.5 of before: 1, 1.5 and 0.5 with errors 1, 1 and 0.25


def test_value_loss_by_hand():
    loss, clipfrac = compute_value_loss(PREDICTED, RETURNS, BEFORE, MASK, cliprange_value=0.5)
    assert loss.item() == pytest.approx(0.5 * (1 + 1 + 1) / 3)
    assert clipfrac.item() == pytest.approx(1 / 3)


def test_the_gradient_is_that_of_the_larger_error_and_zero_where_masked():
    predicted = PREDICTED.clone().requires_grad_()
    compute_value_loss(predicted, RETURNS, BEFORE, MASK, 0.5, "token-sum")[0].backward()
    # 1 - 0;   clipped, so no gradient;   0 - 1
    assert predicted.grad.tolist() == [[1.0, 0.0, -1.0, 0.0]]


def test_the_gradient_matches_finite_differences():
    rng = torch.Generator().manual_seed(0)
    predicted, returns, before = (torch.randn(3, 4, generator=rng, dtype=torch.float64) for _ in range(3))
    mask = torch.ones(3, 4)
    predicted.requires_grad_()
    compute_value_loss(predicted, returns, before, mask, 0.5, "seq-mean-token-mean")[0].backward()
    step = 1e-6
    for position in range(12):
        shift = torch.zeros(12, dtype=torch.float64).index_fill_(0, torch.tensor(position), step).view(3, 4)
        up, down = (
            compute_value_loss(predicted.detach() + sign * shift, returns, before, mask, 0.5, "seq-mean-token-mean")[0]
            for sign in (1, -1)
        )
        slope = (up - down).item() / (2 * step)
        assert predicted.grad.view(-1)[position].item() == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_entropy_by_hand():
    # Uniform over 4 tokens, (3/4, 1/4), and a masked position that holds garbage.
    logits = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [math.log(3), 0.0, -math.inf, -math.inf], [math.nan] * 4]])
    logits.requires_grad_()
    loss = compute_entropy_loss(logits, torch.tensor([[1, 1, 0]]), "token-mean")
    loss.backward()
    entropies = math.log(4), -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert loss.item() == pytest.approx(sum(entropies) / 2)
    assert not logits.grad[0, 2].any()


def test_the_entropy_loss_uses_the_aggregation_mode():
    logits = torch.zeros(2, 3, 4)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    loss = compute_entropy_loss(logits, mask, "seq-mean-token-sum")
    assert loss.item() == pytest.approx((3 + 1) * math.log(4) / 2)
