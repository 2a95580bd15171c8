"""`vanilla`: PPO's clipped ratio (arXiv 1707.06347), clip-higher (DAPO, 2503.14476) and dual clip (1912.09729)."""

from __future__ import annotations

import torch

from verl.algos.aggregate import agg_loss
from verl.algos.policy_loss.common import Terms, clipped_surrogate, finish, loss_config, policy_terms, token_mean
from verl.algos.registry import register_policy_loss
from verl.algos.types import ActorLike, PolicyLoss


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

    `clip_ratio_high` above `clip_ratio_low` is clip-higher. Where A < 0 the loss is at most -A × `clip_ratio_c`: one
    token whose probability rose a hundredfold must not decide the step.
    """
    config = loss_config("vanilla", config)
    terms = policy_terms(old_log_prob, log_prob, advantages, response_mask)
    losses, clipped, bounded = _dual_clip(terms, config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c)
    metrics = {"clipfrac": clipped, "clipfrac_lower": bounded}
    return finish(losses, terms, loss_agg_mode, config, rollout_is_weights, metrics)


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
    """The same loss with its numbers as arguments → (loss, clipfrac, ppo_kl, clipfrac_lower).

    `clip_ratio` is another name of `cliprange`; `cliprange_low` and `cliprange_high` come before it.
    """
    both = clip_ratio if cliprange is None else cliprange
    low = both if cliprange_low is None else cliprange_low
    high = both if cliprange_high is None else cliprange_high
    if low is None or high is None:
        raise ValueError("cliprange: no clip range was given. Pass cliprange=0.2, or cliprange_low and cliprange_high.")
    if clip_ratio_c <= 1.0:
        raise ValueError(f"clip_ratio_c: {clip_ratio_c} must be above 1, the ratio of an unchanged policy. Use 3.0.")
    terms = policy_terms(old_log_prob, log_prob, advantages, response_mask)
    losses, clipped, bounded = _dual_clip(terms, low, high, clip_ratio_c)
    loss = agg_loss(losses, terms.mask, loss_agg_mode, loss_scale_factor=loss_scale_factor)
    clipfrac, ppo_kl, clipfrac_lower = (
        token_mean(values, terms.mask) for values in (clipped, -terms.log_ratio.detach(), bounded)
    )
    return loss, clipfrac, ppo_kl, clipfrac_lower


def _dual_clip(terms: Terms, low: float, high: float, bound: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses per token, where the ratio was clipped, and where the bound for negative advantages took over."""
    losses, clipped = clipped_surrogate(terms.log_ratio.exp(), terms.advantages, low, high)
    limit = -terms.advantages * bound
    bounded = (terms.advantages < 0) & (losses > limit)
    return torch.where(bounded, limit, losses), clipped & ~bounded, bounded
