"""Clip-Cov by hand: of the tokens of high covariance some lose their gradient."""

import pytest
import torch

from verl.algos.policy_loss.clip_cov import compute_policy_loss_clip_cov

LOG_PROB = torch.tensor([[-1.0, -2.0, -3.0, -4.0]], dtype=torch.float64)
ADVANTAGES = torch.tensor([[3.0, 1.0, -1.0, 1.0]], dtype=torch.float64)
MASK = torch.ones(1, 4)
# Means -2.5 and 1: covariances 1.5 · 2 = 3,  0.5 · 0 = 0,  -0.5 · -2 = 1,  -1.5 · 0 = 0


def options(**more):
    return {"policy_loss": {"loss_mode": "clip_cov", "clip_cov_lb": 2.0, "clip_cov_ub": 5.0, **more}}


def test_clip_cov_by_hand():
    log_prob = LOG_PROB.clone().requires_grad_()
    loss, metrics = compute_policy_loss_clip_cov(
        LOG_PROB, log_prob, ADVANTAGES, MASK, "token-sum", options(clip_cov_ratio=0.25)
    )
    loss.backward()
    # One token of four may be cut, and only the first lies in [2, 5]; ratios are 1, so the rest is -(1 - 1 + 1).
    assert loss.item() == pytest.approx(-1.0)
    assert log_prob.grad.tolist() == [pytest.approx([0.0, -1.0, 1.0, -1.0])]
    assert metrics["clip_cov_fraction"].item() == pytest.approx(0.25)


def test_a_ratio_of_zero_cuts_nothing_and_is_ppo():
    loss, metrics = compute_policy_loss_clip_cov(
        LOG_PROB, LOG_PROB, ADVANTAGES, MASK, "token-sum", options(clip_cov_ratio=0.0)
    )
    assert loss.item() == pytest.approx(-4.0)
    assert metrics["clip_cov_fraction"].item() == 0


def test_the_choice_follows_the_generator_and_never_exceeds_the_share():
    rng = torch.Generator().manual_seed(3)
    log_prob = torch.randn(8, 50, generator=rng, dtype=torch.float64)
    advantages = torch.randn(8, 50, generator=rng, dtype=torch.float64)
    config = options(clip_cov_ratio=0.05, clip_cov_lb=-100.0, clip_cov_ub=100.0)

    def cut(seed):
        generator = torch.Generator().manual_seed(seed)
        new = log_prob.clone().requires_grad_()
        loss, _ = compute_policy_loss_clip_cov(
            log_prob, new, advantages, torch.ones(8, 50), "token-sum", config, generator=generator
        )
        loss.backward()
        return new.grad == 0

    assert cut(0).sum() == 0.05 * 400
    assert torch.equal(cut(0), cut(0))
    assert not torch.equal(cut(0), cut(1))


def test_without_a_generator_the_same_micro_batch_makes_the_same_choice():
    """Whatever torch drew before: a resumed run chooses as an uninterrupted one. Another micro-batch chooses anew."""
    log_prob = torch.randn(8, 50, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    config = options(clip_cov_ratio=0.05, clip_cov_lb=-100.0, clip_cov_ub=100.0)

    def cut(old):
        torch.rand(3)
        new = old.clone().requires_grad_()
        compute_policy_loss_clip_cov(old, new, torch.ones(8, 50), torch.ones(8, 50), "token-sum", config)[0].backward()
        return new.grad == 0

    assert torch.equal(cut(log_prob), cut(log_prob))
    assert not torch.equal(cut(log_prob), cut(log_prob + 0.01))
