"""`kl_cov`: tokens that would collapse the entropy are held near the old policy (arXiv 2505.22617)."""

from __future__ import annotations

import torch

from verl.algos.policy_loss.common import covariance, finish, loss_config, policy_terms, share_of_tokens
from verl.algos.registry import register_policy_loss
from verl.algos.types import ActorLike, PolicyLoss


@register_policy_loss(
    "kl_cov",
    paper="2505.22617",
    loss_agg_mode="token-mean",
    clip=None,
    reads=("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef"),
)
def compute_policy_loss_kl_cov(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorLike = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> PolicyLoss:
    """-A × ratio, plus `ppo_kl_coef` × |log-ratio| on the tokens of largest covariance; tensors [batch, response].

    `policy_loss.kl_cov_ratio` is the share of tokens held. Means and choice are taken **within this micro-batch**:
    unlike other losses this one depends on how a batch is cut.
    """
    config = loss_config("kl_cov", config)
    options = config.policy_loss
    terms = policy_terms(old_log_prob, log_prob, advantages, response_mask)
    ranked = covariance(terms).masked_fill(~terms.mask, -torch.inf).flatten()
    largest = ranked.topk(share_of_tokens(terms.mask, options.kl_cov_ratio)).indices
    held = torch.zeros_like(terms.mask).flatten().index_fill_(0, largest, True).view_as(terms.mask)
    losses = -terms.advantages * terms.log_ratio.exp()
    losses = losses + torch.where(held, options.ppo_kl_coef * terms.log_ratio.abs(), torch.zeros_like(losses))
    metrics = {"kl_cov_fraction": held}
    return finish(losses, terms, loss_agg_mode, config, rollout_is_weights, metrics)
