"""`kl_cov`: policy gradient with a KL penalty on the tokens that reduce the entropy most (arXiv 2505.22617)."""

from __future__ import annotations

import torch

from verl.algos.losses import aggregate, covariance, loss_config, mask_inputs, token_count
from verl.algos.registry import ActorLike, PolicyLoss, register_policy_loss


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

    `policy_loss.kl_cov_ratio` is the fraction of tokens with the penalty. Means and selection are **per micro-batch**:
    unlike other losses this one depends on the micro-batch size.
    """
    config = loss_config("kl_cov", config)
    options = config.policy_loss
    inputs = mask_inputs(old_log_prob, log_prob, advantages, response_mask)
    ranked = covariance(inputs).masked_fill(~inputs.mask, -torch.inf).flatten()
    largest = ranked.topk(token_count(inputs.mask, options.kl_cov_ratio)).indices
    penalized = torch.zeros_like(inputs.mask).flatten().index_fill_(0, largest, True).view_as(inputs.mask)
    losses = -inputs.advantages * inputs.log_ratio.exp()
    losses = losses + torch.where(penalized, options.ppo_kl_coef * inputs.log_ratio.abs(), torch.zeros_like(losses))
    metrics = {"kl_cov_fraction": penalized}
    return aggregate(losses, inputs, loss_agg_mode, config, rollout_is_weights, metrics)
