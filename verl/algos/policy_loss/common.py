"""What every policy loss begins and ends with: clean per-token terms, then one number and the usual metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from verl.algos.aggregate import agg_loss
from verl.algos.kl import MAX_LOG_RATIO
from verl.algos.returns import keep
from verl.algos.types import ActorLike, PolicyLoss
from verl.config import ActorConfig, as_config


@dataclass(frozen=True)
class Terms:
    """Per-token inputs [batch, response], at least float32, with 0 where the mask is off, whatever stood there."""

    log_prob: torch.Tensor
    log_ratio: torch.Tensor  # log_prob - old_log_prob, bounded so that its exp is finite
    advantages: torch.Tensor
    mask: torch.Tensor  # boolean


def loss_config(name: str, config: ActorLike) -> ActorConfig:
    """A run's configuration as it is; what a user's dict, or nothing, leaves out is that loss's own."""
    if isinstance(config, ActorConfig):
        return config
    given: Any = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else dict(config or {})
    return as_config(ActorConfig, {**given, "policy_loss": {**(given.get("policy_loss") or {}), "loss_mode": name}})


def policy_terms(
    old_log_prob: torch.Tensor, log_prob: torch.Tensor, advantages: torch.Tensor, response_mask: torch.Tensor
) -> Terms:
    mask = response_mask.bool()
    log_prob = keep(log_prob, mask)
    log_ratio = log_prob - keep(old_log_prob.detach(), mask)
    return Terms(
        log_prob=log_prob,
        log_ratio=log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO),
        advantages=keep(advantages.detach(), mask),
        mask=mask,
    )


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """max(-A ratio, -A clip(ratio, 1 - low, 1 + high)) per token, and where the clipped one was taken."""
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    return torch.maximum(plain, clipped), clipped > plain


def covariance(terms: Terms) -> torch.Tensor:
    """Each token's share in the covariance of log-prob and advantage over this micro-batch, detached."""
    log_prob = terms.log_prob.detach()
    means = [token_mean(values, terms.mask) for values in (log_prob, terms.advantages)]
    return (log_prob - means[0]) * (terms.advantages - means[1])


def share_of_tokens(mask: torch.Tensor, share: float) -> int:
    """How many of the mask's tokens a share is, rounded up: a small micro-batch still has one."""
    # The margin keeps a product that is whole in decimals, such as 30 × 0.1, from rounding up to one more.
    return math.ceil(int(mask.sum()) * share - 1e-9)


def finish(
    losses: torch.Tensor,
    terms: Terms,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: torch.Tensor | None,
    metrics: dict[str, torch.Tensor],
) -> PolicyLoss:
    """Weigh, aggregate and measure. `metrics` are per token here (boolean or number) and come back as means."""
    if rollout_is_weights is not None:
        losses = losses * keep(rollout_is_weights.detach(), terms.mask)
    loss = agg_loss(losses, terms.mask, loss_agg_mode, loss_scale_factor=config.loss_scale_factor)
    log_ratio = terms.log_ratio.detach()
    per_token = {"approx_kl": -log_ratio, "ppo_ratio": log_ratio.exp()} | metrics
    return loss, {name: token_mean(values.detach(), terms.mask) for name, values in per_token.items()}


def token_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over the mask of a number or the share of a condition; 0 when the mask is empty."""
    kept = values & mask if values.dtype == torch.bool else keep(values, mask)
    return kept.sum(dtype=torch.float32) / mask.sum().clamp(min=1)
