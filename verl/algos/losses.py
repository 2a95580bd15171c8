"""The entropy loss, the value loss, and shared parts of policy losses: inputs, clipped surrogate, common metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from verl.algos.kl import MAX_LOG_RATIO
from verl.algos.masked_ops import agg_loss, apply_mask
from verl.algos.registry import ActorLike, PolicyLoss
from verl.config import ActorConfig, as_config
from verl.utils.torch_functional import entropy_from_logits


def compute_entropy_loss(
    logits: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
) -> torch.Tensor:
    """Aggregate the entropy of `logits` [batch, response, vocab] over the model tokens of `response_mask`."""
    return agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode, loss_scale_factor=loss_scale_factor)


def compute_value_loss(
    vpreds: torch.Tensor,
    returns: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped squared error of the critic: per token half the maximum of the squared errors of `vpreds` and of `vpreds`
    clipped to `values` ± `cliprange_value`, where `values` are the predictions that the advantages were computed from.

    All tensors [batch, response]. Returns the loss and the fraction of tokens where the clipped error is larger.
    """
    mask = response_mask.bool()
    predicted, target, old = (apply_mask(tensor, mask) for tensor in (vpreds, returns, values))
    error = (predicted - target) ** 2
    clipped = predicted.clamp(old - cliprange_value, old + cliprange_value)
    clipped_error = (clipped - target) ** 2
    loss = 0.5 * agg_loss(torch.maximum(error, clipped_error), mask, loss_agg_mode, loss_scale_factor=loss_scale_factor)
    clipfrac = ((clipped_error > error) & mask).sum() / mask.sum().clamp(min=1)
    return loss, clipfrac


@dataclass(frozen=True)
class LossInputs:
    """Per-token inputs [batch, response], at least float32, with 0 where the boolean `mask` is False."""

    log_prob: torch.Tensor
    log_ratio: torch.Tensor
    """log_prob - old_log_prob, clamped so that its exp is finite."""
    advantages: torch.Tensor
    mask: torch.Tensor


def loss_config(name: str, config: ActorLike) -> ActorConfig:
    """Return a typed configuration unchanged; complete a dict or None with the defaults of the loss `name`."""
    if isinstance(config, ActorConfig):
        return config
    keys: Any = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else dict(config or {})
    return as_config(ActorConfig, {**keys, "policy_loss": {**(keys.get("policy_loss") or {}), "loss_mode": name}})


def mask_inputs(
    old_log_prob: torch.Tensor, log_prob: torch.Tensor, advantages: torch.Tensor, response_mask: torch.Tensor
) -> LossInputs:
    """Return the masked inputs of a policy loss; gradients flow only through `log_prob`."""
    mask = response_mask.bool()
    log_prob = apply_mask(log_prob, mask)
    log_ratio = log_prob - apply_mask(old_log_prob.detach(), mask)
    return LossInputs(
        log_prob=log_prob,
        log_ratio=log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO),
        advantages=apply_mask(advantages.detach(), mask),
        mask=mask,
    )


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return max(-A ratio, -A clip(ratio, 1 - low, 1 + high)) per token, and where the clipped term is larger."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def covariance(inputs: LossInputs) -> torch.Tensor:
    """Return each token's term of the covariance of log-prob and advantage over this micro-batch, detached."""
    log_prob = inputs.log_prob.detach()
    means = [token_mean(values, inputs.mask) for values in (log_prob, inputs.advantages)]
    return (log_prob - means[0]) * (inputs.advantages - means[1])


def token_count(mask: torch.Tensor, fraction: float) -> int:
    """Return a fraction of the number of tokens in the mask, rounded up, so that it is at least 1."""
    # The margin prevents rounding up a product that is an integer in decimals, such as 30 × 0.1.
    return math.ceil(int(mask.sum()) * fraction - 1e-9)


def aggregate(
    losses: torch.Tensor,
    inputs: LossInputs,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: torch.Tensor | None,
    metrics: dict[str, torch.Tensor],
) -> PolicyLoss:
    """Weight and aggregate the token losses. Returns the loss and means over the tokens: of `metrics` (per token,
    boolean or number) and of the metrics that all policy losses have."""
    if rollout_is_weights is not None:
        losses = losses * apply_mask(rollout_is_weights.detach(), inputs.mask)
    loss = agg_loss(losses, inputs.mask, loss_agg_mode, loss_scale_factor=config.loss_scale_factor)
    log_ratio = inputs.log_ratio.detach()
    per_token = {"approx_kl": -log_ratio, "ppo_ratio": log_ratio.exp()} | metrics
    return loss, {name: token_mean(values.detach(), inputs.mask) for name, values in per_token.items()}


def token_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean of numbers, or the fraction of True, over the mask; 0 if the mask is empty."""
    masked = values & mask if values.dtype == torch.bool else apply_mask(values, mask)
    return masked.sum(dtype=torch.float32) / mask.sum().clamp(min=1)
