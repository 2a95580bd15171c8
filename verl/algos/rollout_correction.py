"""Rollout correction: measure the mismatch between rollout and training policy, and correct it by weights and masks.

Rollout engines use other kernels, other precisions, or older weights, so their log-probs differ from those of the
training engine for the same tokens; with top-p, top-k or min-p they also sample from a truncated distribution. The
importance ratio training / rollout, per token or per sequence, corrects the gradient; truncating it bounds the
variance, and rejection masks tokens or sequences with a large mismatch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from omegaconf import DictConfig

from verl.algos.kl import MAX_LOG_RATIO, kl_penalty
from verl.algos.masked_ops import apply_mask
from verl.config import RolloutCorrectionConfig, as_config
from verl.config.algorithm import Rejection, parse_bounds, parse_rejections
from verl.utils.torch_functional import masked_mean

CorrectionLike: TypeAlias = RolloutCorrectionConfig | DictConfig | Mapping[str, Any] | None

# Quantiles are computed from at most this many evenly spaced tokens, to bound the time.
_QUANTILE_TOKENS = 2**20
_QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


@dataclass(frozen=True)
class Correction:
    """The correction of a batch."""

    weights: torch.Tensor | None
    """[batch, response] factors of the token losses; None: no weights."""
    response_mask: torch.Tensor
    """[batch, response], 0 for rejected tokens; dtype as the input mask."""
    metrics: dict[str, float]


def correct_rollout(
    old_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    config: CorrectionLike = None,
    drawn_log_prob: torch.Tensor | None = None,
) -> Correction:
    """Return the weights, mask and metrics of a batch; all tensors [batch, response].

    `rollout_log_prob`: log-probs under the full distribution of the rollout; `drawn_log_prob`: under the truncated
    distribution, if sampling truncates it. The metrics refer to the distribution that was sampled from, weights and
    mask to `config.denominator`. NaN in a rollout log-prob means unknown: the ratio is 1, and the metrics exclude the
    token.

    `config.rollout_is` is the level of the weights: `token` (the ratio of each token) or `sequence` (the product of the
    ratios, for all tokens of the sequence). Weights are truncated at `rollout_is_threshold`; with a range lo_hi,
    weights outside of it are 0.
    `rollout_rs` masks tokens or whole sequences (`Rejection`).
    """
    config = as_config(RolloutCorrectionConfig, config)
    known = response_mask.bool() & ~rollout_log_prob.isnan()
    if drawn_log_prob is not None:
        known &= ~drawn_log_prob.isnan()
    log_ratio, truncation = _log_ratio(old_log_prob, rollout_log_prob, known), None
    if drawn_log_prob is not None:
        truncation = _log_ratio(drawn_log_prob, rollout_log_prob, known)
    metrics = _mismatch_metrics(log_ratio, known, truncation)
    if truncation is not None and config.denominator == "drawn":
        log_ratio = log_ratio - truncation
    kept_mask, weights = rejection_mask(log_ratio, response_mask, parse_rejections(config), known), None
    if config.rollout_is is not None:
        weights, truncated = importance_weights(log_ratio, response_mask, config)
        metrics["rollout_corr/truncated_fraction"] = float(truncated)
        metrics["rollout_corr/weight_mean"] = float(masked_mean(weights, response_mask))
        if config.rollout_is_batch_normalize:
            weights = _normalize_mean(weights, kept_mask, config.rollout_is)
    metrics |= _masked_metrics(response_mask, kept_mask)
    return Correction(weights, kept_mask, metrics)


def importance_weights(
    log_ratio: torch.Tensor, response_mask: torch.Tensor, config: RolloutCorrectionConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights [batch, response], 0 where masked, and the fraction of tokens whose weight is not their ratio.

    Weights are truncated at the threshold; with a range lo_hi, weights outside of it are 0.
    """
    (lower, upper), level = parse_bounds(config.rollout_is_threshold), config.rollout_is
    if level not in ("token", "sequence"):
        raise ValueError(f"algorithm.rollout_correction.rollout_is: {level!r} is not supported. Use token or sequence.")
    log_ratio = apply_mask(log_ratio, response_mask.bool())
    ratio = _bounded_exp(log_ratio if level == "token" else log_ratio.sum(dim=-1, keepdim=True))
    within = ratio <= upper
    if lower is not None:
        within = within & (ratio >= lower)
        ratio = torch.where(within, ratio, 0.0)
    weights = apply_mask(ratio.clamp(max=upper).expand_as(log_ratio), response_mask.bool())
    return weights, masked_mean((~within).float().expand_as(log_ratio), response_mask)


def _normalize_mean(weights: torch.Tensor, mask: torch.Tensor, level: str) -> torch.Tensor:
    """Divide the weights by their mean over the tokens of `mask`, or over its sequences, unless the mean is 0."""
    if level == "token":
        mean = masked_mean(weights, mask)
    else:  # all tokens of a sequence have the same weight
        mean = masked_mean(apply_mask(weights, mask.bool()).amax(dim=-1), mask.bool().any(dim=-1))
    return weights / torch.where(mean > 0, mean, 1.0)


def rejection_mask(
    log_ratio: torch.Tensor, response_mask: torch.Tensor, rules: Sequence[Rejection], known: torch.Tensor
) -> torch.Tensor:
    """Return `response_mask` with 0 for tokens and sequences rejected by any rule.

    `known`: mask of the tokens with a log-ratio, over which sequence statistics are computed.
    """
    log_ratio, kept = apply_mask(log_ratio, known), response_mask
    for over, kind, lower, upper in rules:
        if kind == "k1":  # compared in log space, since the ratio of a long response may overflow
            value, lower, upper = _reduce(over, log_ratio, known), math.log(lower), math.log(upper)
        else:
            value = _reduce(over, kl_penalty(-log_ratio, torch.zeros_like(log_ratio), kind), known)
        kept = torch.where((value >= lower) & (value <= upper), kept, torch.zeros_like(kept))
    return kept


def _reduce(over: str, values: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Return `values` (0 where not known) unchanged, or their sum, mean or maximum over each sequence [batch, 1]."""
    if over == "token":
        return values
    if over == "seq_max":
        return values.amax(dim=-1, keepdim=True)
    total = values.sum(dim=-1, keepdim=True)
    return total if over == "seq_sum" else total / known.sum(dim=-1, keepdim=True).clamp(min=1)


def mismatch_metrics(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, response_mask: torch.Tensor
) -> dict[str, float]:
    """Return the metrics `rollout_corr/*` of a batch; `log_prob_diff` is the mean absolute difference of log-probs."""
    known = response_mask.bool() & ~rollout_log_prob.isnan()
    return _mismatch_metrics(_log_ratio(old_log_prob, rollout_log_prob, known), known)


def _mismatch_metrics(
    engine_log_ratio: torch.Tensor, mask: torch.Tensor, truncation: torch.Tensor | None = None
) -> dict[str, float]:
    """Compute the metrics `rollout_corr/*`.

    `engine_log_ratio`: log(training / rollout) of full distributions. `truncation`: log(drawn / rollout), which is -log
    of the probability mass that truncated sampling keeps.
    """
    padded = engine_log_ratio if truncation is None else engine_log_ratio - truncation
    per_sequence = _bounded_exp(padded.sum(dim=-1)[mask.any(dim=-1)])
    # Without padding from here on, [tokens]: most of a padded batch is padding.
    log_ratio, same_support = padded[mask], engine_log_ratio[mask]
    if not len(log_ratio):
        log_ratio = same_support = log_ratio.new_zeros(1)  # without tokens there is no mismatch
    zeros = torch.zeros_like(log_ratio)
    divergence = {"k1": kl_penalty(-log_ratio, zeros, "k1"), "k3": kl_penalty(-same_support, zeros, "k3")}
    ratio, distance = _bounded_exp(log_ratio), log_ratio.abs()
    mean_ratio = ratio.mean()
    metrics = {
        "rollout_corr/kl": divergence["k1"].mean(),
        "rollout_corr/k3_kl": divergence["k3"].mean(),
        "rollout_corr/log_prob_diff": distance.mean(),
        "rollout_corr/log_prob_diff_p99": _quantile(distance, 0.99),
        "rollout_corr/log_prob_diff_max": distance.max(),
        "rollout_corr/ratio_mean": mean_ratio,
        # Relative effective sample size of tokens weighted by their ratios: 1 if the policies are equal.
        "rollout_corr/effective_share": mean_ratio**2 / (ratio**2).mean().clamp(min=1e-12),
        "rollout_corr/sequence_ratio_mean": per_sequence.mean() if len(per_sequence) else per_sequence.new_zeros(()),
    }
    metrics |= {f"rollout_corr/ratio_{name}": _quantile(ratio, share) for name, share in _QUANTILES.items()}
    if truncation is not None:
        # k3 does not include tokens that are never drawn. KL(drawn ‖ training) = KL(drawn ‖ rollout) +
        # E[log rollout / training], and the first term is the mean of `truncation`.
        truncation_kl = truncation[mask].sum() / mask.sum().clamp(min=1)
        metrics["rollout_corr/k3_kl"] = metrics["rollout_corr/k3_kl"] + truncation_kl
        metrics["rollout_corr/truncation_kl"] = truncation_kl
        metrics["rollout_corr/engine_log_prob_diff"] = same_support.abs().mean()
    return {name: float(value) for name, value in metrics.items()}


def _log_ratio(old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return apply_mask(old_log_prob, mask.bool()) - apply_mask(rollout_log_prob, mask.bool())


def _bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _masked_metrics(before: torch.Tensor, after: torch.Tensor) -> dict[str, float]:
    if after is before:
        return {"rollout_corr/masked_fraction": 0.0, "rollout_corr/masked_sequence_fraction": 0.0}
    dropped = (before != 0) & (after == 0)
    rows = (before != 0).any(dim=-1)
    emptied = rows & ~(after != 0).any(dim=-1)
    return {
        "rollout_corr/masked_fraction": float(masked_mean(dropped.float(), before)),
        "rollout_corr/masked_sequence_fraction": float(masked_mean(emptied.float(), rows)),
    }


def _quantile(tokens: torch.Tensor, share: float) -> torch.Tensor:
    tokens = tokens[:: -(-len(tokens) // _QUANTILE_TOKENS)]
    return tokens.kthvalue(round(share * (len(tokens) - 1)) + 1).values
