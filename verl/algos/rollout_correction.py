"""When the policy that generated is not quite the one that trains: weigh, mask, and always measure the difference.

Rollout engines run other kernels, other precisions, or older weights, so their log-probs differ from the training
engine's for the same tokens; and with top-p, top-k or min-p they draw from a part of the distribution only. The ratio
training / rollout, per token or over a sequence, corrects the gradient; truncating it bounds the variance, and masking
drops what no weight can save.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from omegaconf import DictConfig

from verl.algos.kl import MAX_LOG_RATIO, kl_penalty
from verl.algos.returns import keep
from verl.config import RolloutCorrectionConfig, as_config
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

    `rollout_is` truncates the ratio at `rollout_is_threshold`: per `token`, or the product over the `sequence` for all
    its tokens. `rollout_rs` masks what lies outside [`rollout_rs_threshold_lower`, `rollout_rs_threshold`]: single
    tokens, or whole sequences by the product of their ratios (`sequence`) or its geometric mean (`geometric`).
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
    weights = None
    if config.rollout_is is not None:
        weights, truncated = importance_weights(
            log_ratio, response_mask, config.rollout_is, config.rollout_is_threshold
        )
        metrics["rollout_corr/truncated_fraction"] = float(truncated)
        metrics["rollout_corr/weight_mean"] = float(masked_mean(weights, response_mask))
    kept_mask = response_mask
    if config.rollout_rs is not None:
        upper = config.rollout_rs_threshold or config.rollout_is_threshold
        lower = config.rollout_rs_threshold_lower or 1.0 / upper
        kept_mask = rejection_mask(log_ratio, response_mask, config.rollout_rs, lower, upper)
    metrics |= _masked_metrics(response_mask, kept_mask)
    return Correction(weights, kept_mask, metrics)


def importance_weights(
    log_ratio: torch.Tensor, response_mask: torch.Tensor, level: str, threshold: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """min(ratio, threshold) for every token [batch, response], 0 where masked; and the share of tokens truncated."""
    ratio = _ratio(log_ratio, response_mask, level)
    weights = keep(ratio.clamp(max=threshold).expand_as(log_ratio), response_mask.bool())
    return weights, masked_mean((ratio > threshold).float().expand_as(log_ratio), response_mask)


def rejection_mask(
    log_ratio: torch.Tensor, response_mask: torch.Tensor, level: str, lower: float, upper: float
) -> torch.Tensor:
    """`response_mask` with the tokens off whose ratio (token, sequence or geometric) is outside [lower, upper]."""
    if lower > upper:
        raise ValueError(
            f"algorithm.rollout_correction.rollout_rs_threshold_lower: {lower:g} is above the upper one, {upper:g}; "
            "everything would be masked. Set it below."
        )
    ratio = _ratio(log_ratio, response_mask, level)
    return torch.where((ratio >= lower) & (ratio <= upper), response_mask, torch.zeros_like(response_mask))


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


def _ratio(log_ratio: torch.Tensor, mask: torch.Tensor, level: str) -> torch.Tensor:
    """exp of the log-ratio per token [batch, response], or of its sum or mean over each sequence [batch, 1]."""
    if level == "token":
        log_ratio = keep(log_ratio, mask.bool())
    elif level in ("sequence", "geometric"):
        total = keep(log_ratio, mask.bool()).sum(dim=-1, keepdim=True)
        tokens = mask.bool().sum(dim=-1, keepdim=True).clamp(min=1)
        log_ratio = total if level == "sequence" else total / tokens
    else:
        raise ValueError(f"algorithm.rollout_correction: {level!r} is not known. Use token, sequence or geometric.")
    return _bounded_exp(log_ratio)


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
