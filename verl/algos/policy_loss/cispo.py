"""`cispo`: a clipped importance weight on the plain policy gradient; no token loses its gradient (2506.13585)."""

from __future__ import annotations

import torch

from verl.algos.policy_loss.common import finish, loss_config, policy_terms
from verl.algos.registry import register_policy_loss
from verl.algos.types import ActorLike, PolicyLoss


# The paper tunes the upper bound of the weight and names none; 5 is that of ScaleRL (2510.13786). A weight that is
# clipped at 1 - 1 has no lower bound.
@register_policy_loss("cispo", paper="2506.13585", loss_agg_mode="token-mean", clip=(1.0, 4.0))
def compute_policy_loss_cispo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorLike = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> PolicyLoss:
    """-sg[clip(ratio, 1 - low, 1 + high)] × A × log π per token; tensors [batch, response].

    A `clip_ratio_low` of 1 leaves the weight unbounded below, as in the paper.
    """
    config = loss_config("cispo", config)
    terms = policy_terms(old_log_prob, log_prob, advantages, response_mask)
    ratio = terms.log_ratio.detach().exp()
    weight = ratio.clamp(1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high)
    losses = -weight * terms.advantages * terms.log_prob
    metrics = {"clipfrac": weight != ratio}
    return finish(losses, terms, loss_agg_mode, config, rollout_is_weights, metrics)
