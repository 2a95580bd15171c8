"""`gpg`: policy gradient without ratio or clip (arXiv 2504.02546)."""

from __future__ import annotations

import torch

from verl.algos.losses import aggregate, loss_config, mask_inputs
from verl.algos.registry import ActorLike, PolicyLoss, register_policy_loss


@register_policy_loss("gpg", paper="2504.02546", loss_agg_mode="token-mean", clip=None)
def compute_policy_loss_gpg(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorLike = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> PolicyLoss:
    """-A × log π per token; tensors [batch, response]. `old_log_prob` is used for metrics only."""
    config = loss_config("gpg", config)
    inputs = mask_inputs(old_log_prob, log_prob, advantages, response_mask)
    losses = -inputs.advantages * inputs.log_prob
    return aggregate(losses, inputs, loss_agg_mode, config, rollout_is_weights, {})
