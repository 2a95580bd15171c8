"""`clip_cov`: some tokens that would collapse the entropy get no gradient (arXiv 2505.22617)."""

from __future__ import annotations

import torch

from verl.algos.policy_loss.common import (
    clipped_surrogate,
    covariance,
    finish,
    loss_config,
    policy_terms,
    share_of_tokens,
)
from verl.algos.registry import register_policy_loss
from verl.algos.types import ActorLike, PolicyLoss


@register_policy_loss(
    "clip_cov", paper="2505.22617", loss_agg_mode="token-mean", clip=(0.2, 0.2), reads=("policy_loss.clip_cov_*",)
)
def compute_policy_loss_clip_cov(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorLike = None,
    rollout_is_weights: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> PolicyLoss:
    """PPO's clip; of the tokens whose covariance is in [`clip_cov_lb`, `clip_cov_ub`] a few, chosen at random, lose it.

    `policy_loss.clip_cov_ratio` is the share of tokens chosen. Means and choice are taken **within this micro-batch**:
    unlike other losses this one depends on how a batch is cut. Random numbers come from `generator`; without one from
    the old log-probs, so the same micro-batch makes the same choice on any rank and in a resumed run.
    """
    config = loss_config("clip_cov", config)
    options = config.policy_loss
    terms = policy_terms(old_log_prob, log_prob, advantages, response_mask)
    ratio = terms.log_ratio.exp()
    losses, clipped = clipped_surrogate(ratio, terms.advantages, config.clip_ratio_low, config.clip_ratio_high)
    token_covariance = covariance(terms)
    candidates = terms.mask & ~clipped
    candidates &= (token_covariance >= options.clip_cov_lb) & (token_covariance <= options.clip_cov_ub)
    positions = candidates.flatten().nonzero().squeeze(-1)
    if generator is None:
        generator = _seeded_by(old_log_prob.detach()[terms.mask])
    shuffled = positions[torch.randperm(len(positions), generator=generator, device=losses.device)]
    drawn = shuffled[: share_of_tokens(terms.mask, options.clip_cov_ratio)]
    chosen = torch.zeros_like(candidates).flatten().index_fill_(0, drawn, True).view_as(candidates)
    losses = losses.masked_fill(chosen, 0.0)
    metrics = {"clipfrac": clipped | chosen, "clip_cov_fraction": chosen}
    return finish(losses, terms, loss_agg_mode, config, rollout_is_weights, metrics)


def _seeded_by(values: torch.Tensor) -> torch.Generator:
    """A generator that depends on nothing but these numbers."""
    bits = values.double().sum().view(torch.int64).item()
    return torch.Generator(device=values.device).manual_seed(int(bits) & (2**63 - 1))
