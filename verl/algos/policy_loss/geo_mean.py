"""`geo_mean`: the geometric mean of a sequence's token ratios, each clipped in log space (GMPO, 2507.20673)."""

from __future__ import annotations

import torch

from verl.algos.policy_loss.common import finish, loss_config, policy_terms
from verl.algos.registry import register_policy_loss
from verl.algos.types import ActorLike, PolicyLoss
from verl.utils.torch_functional import masked_mean


@register_policy_loss("geo_mean", paper="2507.20673", loss_agg_mode="seq-mean-token-mean", clip=(0.4, 0.4))
def compute_policy_loss_geo_mean(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: ActorLike = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> PolicyLoss:
    """-A × (Π ratio)^(1 / length) per sequence; tensors [batch, response].

    `clip_ratio_low` and `clip_ratio_high` are distances of the log-ratio from 0 (the paper: 0.4). As in PPO only the
    side is clipped on which the step has already been taken: the upper one where A > 0, the lower where A < 0.
    The paper averages over sequences, seq-mean-token-mean; another `loss_agg_mode` is obeyed.
    """
    config = loss_config("geo_mean", config)
    terms = policy_terms(old_log_prob, log_prob, advantages, response_mask)
    positive = terms.advantages > 0
    held = torch.where(
        positive, terms.log_ratio.clamp(max=config.clip_ratio_high), terms.log_ratio.clamp(min=-config.clip_ratio_low)
    )
    sequence_ratio = masked_mean(held, terms.mask, axis=-1).exp()[:, None]
    losses = -terms.advantages * sequence_ratio
    metrics = {"clipfrac": held != terms.log_ratio, "sequence_ratio": sequence_ratio.expand_as(losses)}
    return finish(losses, terms, loss_agg_mode, config, rollout_is_weights, metrics)
