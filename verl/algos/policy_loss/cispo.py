"""`cispo`: policy gradient with a clipped importance weight; every token keeps a gradient (arXiv 2506.13585)."""

from __future__ import annotations

import torch

from verl.algos.losses import aggregate, loss_config, mask_inputs
from verl.algos.registry import ActorLike, PolicyLoss, register_policy_loss


# The paper does not state the upper bound of the weight; 1 + 4 = 5 is from ScaleRL (2510.13786). The lower bound
# 1 - 1 = 0 has no effect.
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

    sg: stop-gradient. With a `clip_ratio_low` of 1 there is no lower bound, as in the paper.
    """
    config = loss_config("cispo", config)
    inputs = mask_inputs(old_log_prob, log_prob, advantages, response_mask)
    ratio = inputs.log_ratio.detach().exp()
    weight = ratio.clamp(1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high)
    losses = -weight * inputs.advantages * inputs.log_prob
    metrics = {"clipfrac": weight != ratio}
    return aggregate(losses, inputs, loss_agg_mode, config, rollout_is_weights, metrics)
