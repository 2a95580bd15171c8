"""PPO's clip by hand: clip-higher, dual clip, and the older function with its numbers as arguments."""

import math

import pytest
import torch
from omegaconf import OmegaConf

from verl.algos.policy_loss.vanilla import compute_policy_loss, compute_policy_loss_vanilla
from verl.config import ActorConfig, as_config

# Ratios 1.5, 0.5 and 5 of new to old probability.
OLD = torch.zeros(1, 6, dtype=torch.float64)
NEW = torch.tensor([[1.5, 0.5, 5.0, 1.5, 0.5, 5.0]], dtype=torch.float64).log()
ADVANTAGES = torch.tensor([[2.0, 2.0, 2.0, -2.0, -2.0, -2.0]], dtype=torch.float64)
MASK = torch.ones(1, 6)
CONFIG = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}
# A = 2:   ratio 1.5 is clipped to 1.28: -2.56;   0.5 is not (pessimistic side): -1;   5 to 1.28: -2.56
# A = -2:  1.5 is not clipped: 3;   0.5 is clipped to 0.8: 1.6;   5 would be 10 but the dual clip stops at 2 · 3 = 6
TOKEN_LOSSES = [-2.56, -1.0, -2.56, 3.0, 1.6, 6.0]


def test_vanilla_by_hand():
    loss, metrics = compute_policy_loss_vanilla(OLD, NEW, ADVANTAGES, MASK, "token-mean", CONFIG)
    assert loss.item() == pytest.approx(sum(TOKEN_LOSSES) / 6)
    assert metrics["clipfrac"].item() == pytest.approx(3 / 6)
    assert metrics["clipfrac_lower"].item() == pytest.approx(1 / 6)
    assert metrics["ppo_ratio"].item() == pytest.approx(2 * (1.5 + 0.5 + 5.0) / 6)
    assert metrics["approx_kl"].item() == pytest.approx(-2 * math.log(1.5 * 0.5 * 5.0) / 6)


def test_compute_policy_loss_is_the_same_loss_with_numbers_as_arguments():
    loss, clipfrac, kl, lower = compute_policy_loss(
        OLD, NEW, ADVANTAGES, MASK, cliprange=9.9, cliprange_low=0.2, cliprange_high=0.28
    )
    assert loss.item() == pytest.approx(sum(TOKEN_LOSSES) / 6)
    assert (clipfrac.item(), lower.item()) == pytest.approx((3 / 6, 1 / 6))
    assert kl.item() == pytest.approx(-2 * math.log(3.75) / 6)


def test_clip_ratio_is_another_name_of_cliprange():
    given = [compute_policy_loss(OLD, NEW, ADVANTAGES, MASK, **{name: 0.3})[0] for name in ("cliprange", "clip_ratio")]
    assert given[0] == given[1]
    with pytest.raises(ValueError, match="cliprange"):
        compute_policy_loss(OLD, NEW, ADVANTAGES, MASK)
    with pytest.raises(ValueError, match=r"clip_ratio_c"):
        compute_policy_loss(OLD, NEW, ADVANTAGES, MASK, 0.2, clip_ratio_c=0.5)


@pytest.mark.parametrize(
    "config", [CONFIG, OmegaConf.create(CONFIG), as_config(ActorConfig, CONFIG)], ids=["dict", "DictConfig", "ours"]
)
def test_any_kind_of_configuration_is_accepted(config):
    loss, _ = compute_policy_loss_vanilla(OLD, NEW, ADVANTAGES, MASK, "token-sum", config)
    assert loss.item() == pytest.approx(sum(TOKEN_LOSSES))


def test_rollout_weights_multiply_the_token_losses():
    weights = torch.tensor([[0.5, 1.0, 0.0, 1.0, 2.0, 1.0]])
    loss, _ = compute_policy_loss_vanilla(OLD, NEW, ADVANTAGES, MASK, "token-sum", CONFIG, weights)
    # -2.56 / 2 - 1 + 0 + 3 + 1.6 · 2 + 6
    assert loss.item() == pytest.approx(-1.28 - 1.0 + 3.0 + 3.2 + 6.0)
