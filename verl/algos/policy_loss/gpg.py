"""`gpg`: the plain policy gradient, without ratio or clip (arXiv 2504.02546)."""

from __future__ import annotations

import torch

from verl.algos.policy_loss.common import finish, loss_config, policy_terms
from verl.algos.registry import register_policy_loss
from verl.algos.types import ActorLike, PolicyLoss


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
    terms = policy_terms(old_log_prob, log_prob, advantages, response_mask)
    losses = -terms.advantages * terms.log_prob
    return finish(losses, terms, loss_agg_mode, config, rollout_is_weights, {})
