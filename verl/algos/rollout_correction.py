"""When the policy that generated is not quite the one that trains: weigh, mask, and always measure the difference.

Rollout engines run other kernels, other precisions, or older weights, so their log-probs differ from the training
engine's for the same tokens; and with top-p, top-k or min-p they draw from a part of the distribution only. The ratio
training / rollout, per token or over a sequence, corrects the gradient; truncating it bounds the variance, and masking
drops what no weight can save.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from omegaconf import DictConfig

from verl.algos.kl import MAX_LOG_RATIO, kl_penalty
from verl.algos.returns import keep
from verl.config import RolloutCorrectionConfig, as_config
from verl.config.algorithm import Rejection, bounds, rejections
from verl.utils.torch_functional import masked_mean

CorrectionLike: TypeAlias = RolloutCorrectionConfig | DictConfig | Mapping[str, Any] | None

# Quantiles are read from at most this many evenly spaced tokens; more would only cost time.
_QUANTILE_TOKENS = 2**20
_QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


@dataclass(frozen=True)
class Correction:
    """What training uses instead of the rollout's word."""

    weights: torch.Tensor | None  # [batch, response], multiplies the token losses; None: no weighing
    response_mask: torch.Tensor  # [batch, response], with rejected tokens off; dtype as given
    metrics: dict[str, float]


def correct_rollout(
    old_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    config: CorrectionLike = None,
    drawn_log_prob: torch.Tensor | None = None,
) -> Correction:
    """Weights, mask and metrics for one batch; all tensors [batch, response].

    `rollout_log_prob` is under the rollout's whole distribution; `drawn_log_prob`, where sampling cut a part of it off,
    under what was left. The metrics compare with what was drawn from; weights and mask with `config.denominator`. Where
    one of the rollout's is NaN, nobody knows what the token was sampled with: its ratio is 1, and the metrics are those
    of the others.

    `rollout_is` truncates the ratio at `rollout_is_threshold`, or with two of them takes 0 outside: per `token`, or the
    product over the `sequence` for all its tokens. `rollout_rs` masks tokens or whole sequences (`Rejection`).
    """
    config = as_config(RolloutCorrectionConfig, config)
    known = response_mask.bool() & ~rollout_log_prob.isnan()
    if drawn_log_prob is not None:
        known &= ~drawn_log_prob.isnan()
    log_ratio, cut_off = _log_ratio(old_log_prob, rollout_log_prob, known), None
    if drawn_log_prob is not None:
        cut_off = _log_ratio(drawn_log_prob, rollout_log_prob, known)
    metrics = _mismatch_metrics(log_ratio, known, cut_off)
    if cut_off is not None and config.denominator == "drawn":
        log_ratio = log_ratio - cut_off
    kept_mask, weights = rejection_mask(log_ratio, response_mask, rejections(config), known), None
    if config.rollout_is is not None:
        weights, truncated = importance_weights(log_ratio, response_mask, config)
        metrics["rollout_corr/truncated_fraction"] = float(truncated)
        metrics["rollout_corr/weight_mean"] = float(masked_mean(weights, response_mask))
        if config.rollout_is_batch_normalize:
            weights = _of_mean_one(weights, kept_mask, config.rollout_is)
    metrics |= _masked_metrics(response_mask, kept_mask)
    return Correction(weights, kept_mask, metrics)


def importance_weights(
    log_ratio: torch.Tensor, response_mask: torch.Tensor, config: RolloutCorrectionConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every token [batch, response]: the ratio, at most the threshold, or 0 outside of two; 0 where masked. And the
    share of tokens that have another weight than their ratio."""
    (lower, upper), level = bounds(config.rollout_is_threshold), config.rollout_is
    if level not in ("token", "sequence"):
        raise ValueError(f"algorithm.rollout_correction.rollout_is: {level!r} is no level. Use token or sequence.")
    log_ratio = keep(log_ratio, response_mask.bool())
    ratio = _bounded_exp(log_ratio if level == "token" else log_ratio.sum(dim=-1, keepdim=True))
    within = ratio <= upper
    if lower is not None:
        within = within & (ratio >= lower)
        ratio = torch.where(within, ratio, 0.0)
    weights = keep(ratio.clamp(max=upper).expand_as(log_ratio), response_mask.bool())
    return weights, masked_mean((~within).float().expand_as(log_ratio), response_mask)


def _of_mean_one(weights: torch.Tensor, mask: torch.Tensor, level: str) -> torch.Tensor:
    """Divided by their mean over the batch's tokens that stay, or its sequences; as they are where all are 0."""
    if level == "token":
        mean = masked_mean(weights, mask)
    else:  # a sequence's tokens have one weight
        mean = masked_mean(keep(weights, mask.bool()).amax(dim=-1), mask.bool().any(dim=-1))
    return weights / torch.where(mean > 0, mean, 1.0)


def rejection_mask(
    log_ratio: torch.Tensor, response_mask: torch.Tensor, rules: Sequence[Rejection], known: torch.Tensor
) -> torch.Tensor:
    """`response_mask` with what any of the rules rejects off: tokens, or all of a sequence, by its `known` tokens."""
    log_ratio, kept = keep(log_ratio, known), response_mask
    for over, kind, lower, upper in rules:
        if kind == "k1":  # bounds of the ratio; of its logarithm, as the ratio of a long answer is beyond any number
            value, lower, upper = _over(over, log_ratio, known), math.log(lower), math.log(upper)
        else:
            value = _over(over, kl_penalty(-log_ratio, torch.zeros_like(log_ratio), kind), known)
        kept = torch.where((value >= lower) & (value <= upper), kept, torch.zeros_like(kept))
    return kept


def _over(over: str, values: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """`values` (0 where not known) as they are, or their sum, mean or maximum over each sequence [batch, 1]."""
    if over == "token":
        return values
    if over == "seq_max":
        return values.amax(dim=-1, keepdim=True)
    total = values.sum(dim=-1, keepdim=True)
    return total if over == "seq_sum" else total / known.sum(dim=-1, keepdim=True).clamp(min=1)


def mismatch_metrics(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, response_mask: torch.Tensor
) -> dict[str, float]:
    """How far the two policies are apart on this batch. `log_prob_diff` is the mean |difference| of log-probs."""
    known = response_mask.bool() & ~rollout_log_prob.isnan()
    return _mismatch_metrics(_log_ratio(old_log_prob, rollout_log_prob, known), known)


def _mismatch_metrics(
    between_engines: torch.Tensor, mask: torch.Tensor, cut_off: torch.Tensor | None = None
) -> dict[str, float]:
    """`between_engines` is log(training / rollout), `cut_off` log(drawn / rollout): -log of what sampling left."""
    padded = between_engines if cut_off is None else between_engines - cut_off
    per_sequence = _bounded_exp(padded.sum(dim=-1)[mask.any(dim=-1)])
    # Only real tokens from here on, [tokens]: long answers are few, and most of a padded batch is padding.
    log_ratio, same_support = padded[mask], between_engines[mask]
    if not len(log_ratio):
        log_ratio = same_support = log_ratio.new_zeros(1)  # two policies that said nothing agree
    nothing = torch.zeros_like(log_ratio)
    divergence = {"k1": kl_penalty(-log_ratio, nothing, "k1"), "k3": kl_penalty(-same_support, nothing, "k3")}
    ratio, distance = _bounded_exp(log_ratio), log_ratio.abs()
    mean_ratio = ratio.mean()
    metrics = {
        "rollout_corr/kl": divergence["k1"].mean(),
        "rollout_corr/k3_kl": divergence["k3"].mean(),
        "rollout_corr/log_prob_diff": distance.mean(),
        "rollout_corr/log_prob_diff_p99": _quantile(distance, 0.99),
        "rollout_corr/log_prob_diff_max": distance.max(),
        "rollout_corr/ratio_mean": mean_ratio,
        # Effective share of the tokens if they were weighted by their ratios: 1 when the policies agree.
        "rollout_corr/effective_share": mean_ratio**2 / (ratio**2).mean().clamp(min=1e-12),
        "rollout_corr/sequence_ratio_mean": per_sequence.mean() if len(per_sequence) else per_sequence.new_zeros(()),
    }
    metrics |= {f"rollout_corr/ratio_{name}": _quantile(ratio, share) for name, share in _QUANTILES.items()}
    if cut_off is not None:
        # k3 knows nothing of tokens that are never drawn. What they weigh adds to it: KL(drawn ‖ training) =
        # KL(drawn ‖ rollout) + E[log rollout / training], and the first is this mean, whatever was drawn.
        truncation = cut_off[mask].sum() / mask.sum().clamp(min=1)
        metrics["rollout_corr/k3_kl"] = metrics["rollout_corr/k3_kl"] + truncation
        metrics["rollout_corr/truncation_kl"] = truncation
        metrics["rollout_corr/engine_log_prob_diff"] = same_support.abs().mean()
    return {name: float(value) for name, value in metrics.items()}


def _log_ratio(old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return keep(old_log_prob, mask.bool()) - keep(rollout_log_prob, mask.bool())


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
