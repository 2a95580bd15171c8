"""`vanilla`: PPO's clipped ratio (arXiv 1707.06347), clip-higher (DAPO, 2503.14476) and dual clip (1912.09729)."""

from __future__ import annotations

import torch

from verl.algos.losses import LossInputs, aggregate, clipped_surrogate, loss_config, mask_inputs, token_mean
from verl.algos.masked_ops import agg_loss
from verl.algos.registry import ActorLike, PolicyLoss, register_policy_loss


@register_policy_loss(
    "vanilla", paper="1707.06347", loss_agg_mode="token-mean", clip=(0.2, 0.2), reads=("clip_ratio_c",)
)
def compute_policy_loss_vanilla(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorLike = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> PolicyLoss:
    """max(-A ratio, -A clip(ratio, 1 - low, 1 + high)) per token; tensors [batch, response].

    `clip_ratio_high` above `clip_ratio_low` is clip-higher. Dual clip: where A < 0 the loss is at most -A ×
    `clip_ratio_c`, so that a token with a very large ratio does not dominate the step.
    """
    config = loss_config("vanilla", config)
    inputs = mask_inputs(old_log_prob, log_prob, advantages, response_mask)
    losses, clipped, bounded = _dual_clip(inputs, config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c)
    metrics = {"clipfrac": clipped, "clipfrac_lower": bounded}
    return aggregate(losses, inputs, loss_agg_mode, config, rollout_is_weights, metrics)


def compute_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
    clip_ratio: float | None = None,
    loss_scale_factor: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same loss with plain arguments; returns (loss, clipfrac, ppo_kl, clipfrac_lower).

    `clip_ratio` is an alias of `cliprange`; `cliprange_low` and `cliprange_high` take precedence.
    """
    both = clip_ratio if cliprange is None else cliprange
    low = both if cliprange_low is None else cliprange_low
    high = both if cliprange_high is None else cliprange_high
    if low is None or high is None:
        raise ValueError("cliprange: not set. Pass cliprange=0.2, or cliprange_low and cliprange_high.")
    if clip_ratio_c <= 1.0:
        raise ValueError(f"clip_ratio_c: {clip_ratio_c} must be above 1, the ratio of an unchanged policy. Use 3.0.")
    inputs = mask_inputs(old_log_prob, log_prob, advantages, response_mask)
    losses, clipped, bounded = _dual_clip(inputs, low, high, clip_ratio_c)
    loss = agg_loss(losses, inputs.mask, loss_agg_mode, loss_scale_factor=loss_scale_factor)
    clipfrac, ppo_kl, clipfrac_lower = (
        token_mean(values, inputs.mask) for values in (clipped, -inputs.log_ratio.detach(), bounded)
    )
    return loss, clipfrac, ppo_kl, clipfrac_lower


def _dual_clip(
    inputs: LossInputs, low: float, high: float, bound: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return losses per token, where the ratio is clipped, and where the bound for negative advantages applies."""
    losses, clipped = clipped_surrogate(inputs.log_ratio.exp(), inputs.advantages, low, high)
    limit = -inputs.advantages * bound
    bounded = (inputs.advantages < 0) & (losses > limit)
    return torch.where(bounded, limit, losses), clipped & ~bounded, bounded
