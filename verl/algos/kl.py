"""KL divergence between two policies: estimates from sampled tokens, top-k KL, KL loss, KL coefficient controllers.

With d = log p - log q on tokens sampled from p: k1 = d, k2 = d² / 2, k3 = exp(-d) - 1 + d (J. Schulman, "Approximating
KL divergence"). The means of the values k1 and k3 are KL(p || q), but their gradients are not its gradient: on tokens
sampled from p the mean gradient of k1 is 0 and that of k3 is the gradient of KL(q || p), while that of k2 is exactly
the gradient of KL(p || q) (arXiv 2510.01555). A trailing "+" therefore combines the value of an estimate with the
gradient of k2, and so does "kl" with the value of k1; without a gradient, "kl" is k1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from omegaconf import DictConfig

from verl.algos.masked_ops import agg_loss, apply_mask
from verl.config import KLControllerConfig, as_config

# Instead of -inf, the log-prob of an impossible token: its exp is 0, and 0 times it is 0, not NaN.
_MIN_LOG_PROB = -1e4
# Minimum probability of all tokens outside the top k: below it, 1 - sum is only rounding error.
_MIN_REMAINDER = 1e-7
# Log-ratios are clamped to ± this value, so that one outlier token stays finite.
MAX_LOG_RATIO = 20.0


def kl_penalty(logprob: torch.Tensor, ref_logprob: torch.Tensor, kl_penalty: str) -> torch.Tensor:
    """Estimate KL(policy || reference) per token, in the shape of the inputs; `kl_penalty` is a key of `KL_ESTIMATES`,
    possibly with a trailing "+".

    Over tokens sampled from the policy, the mean gradient of `kl`, `k2` and names with "+" is that of KL(policy ||
    reference), of `k3` that of KL(reference || policy), of `k1` 0.
    """
    name = kl_penalty
    straight_through = name == "kl" or name.endswith("+")
    if name == "full":
        raise ValueError("kl_penalty: 'full' needs both models' whole distributions at every token. Use low_var_kl.")
    if name.removesuffix("+") not in KL_ESTIMATES:
        raise ValueError(
            f"kl_penalty: {name!r} is not known. Use one of {', '.join(KL_ESTIMATES)}, "
            "with a trailing + for the unbiased gradient."
        )
    dtype = torch.promote_types(logprob.dtype, torch.float32)
    difference = logprob.to(dtype) - ref_logprob.to(dtype)
    estimate = KL_ESTIMATES[name.removesuffix("+")](difference)
    if not straight_through:
        return estimate
    unbiased = _k2(difference)
    return estimate.detach() + (unbiased - unbiased.detach())  # + 0: the value is bit-identical to the estimate


def compute_kl_loss(
    log_prob: torch.Tensor,
    ref_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    kl_loss_type: str = "low_var_kl",
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
) -> torch.Tensor:
    """Aggregate the KL to the reference; all tensors [batch, response]. Values of masked tokens are ignored."""
    mask = response_mask.bool()
    divergence = kl_penalty(apply_mask(log_prob, mask), apply_mask(ref_log_prob, mask), kl_loss_type)
    return agg_loss(divergence, response_mask, loss_agg_mode, loss_scale_factor=loss_scale_factor)


def top_k_kl(log_prob: torch.Tensor, ref_log_prob: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the KL between two distributions over K tokens, with the rest of the vocabulary as one more outcome.

    `log_prob`, `ref_log_prob` [..., K]: log-probs of the same tokens; returns [...]. `kind` is a key of `TOP_K_KLS`.
    It is a lower bound of the KL over the whole vocabulary, since merging outcomes cannot increase a KL. The gradient
    is exact.
    """
    policy, reference = (_append_remainder(value) for value in (log_prob, ref_log_prob))
    expectation_over, other = (policy, reference) if TOP_K_KLS[kind] else (reference, policy)
    return (expectation_over.exp() * (expectation_over - other)).sum(-1)


def _append_remainder(log_probs: torch.Tensor) -> torch.Tensor:
    """[..., K] -> [..., K + 1]: append the log-prob of all other tokens together. All values are finite."""
    log_probs = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32)).clamp(min=_MIN_LOG_PROB)
    remainder = (1.0 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=_MIN_REMAINDER)
    return torch.cat([log_probs, remainder.log()], dim=-1)


def _k1(difference: torch.Tensor) -> torch.Tensor:
    return difference


def _k2(difference: torch.Tensor) -> torch.Tensor:
    return 0.5 * difference**2


def _k3(difference: torch.Tensor) -> torch.Tensor:
    bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-bounded) + bounded


TOP_K_KLS = {"reverse_kl_topk": True, "forward_kl_topk": False}
"""By name: True for KL(policy || reference), False for KL(reference || policy)."""

KL_ESTIMATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "kl": _k1,
    "k1": _k1,
    "abs": torch.abs,
    "mse": _k2,
    "k2": _k2,
    "low_var_kl": _k3,
    "k3": _k3,
}


class FixedKLController:
    """Constant KL coefficient `value`."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        pass


class AdaptiveKLController:
    """KL coefficient `value` that increases while the KL is above `target_kl` and decreases while it is below
    (arXiv 1909.08593)."""

    # Bound of the relative error of one observation.
    MAX_ERROR = 0.2

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        if target_kl <= 0 or horizon <= 0:
            raise ValueError(f"kl_ctrl: target_kl={target_kl} and horizon={horizon} must both be above 0.")
        self.value = init_kl_coef
        self.target = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Update the coefficient by a KL measured over `n_steps` samples."""
        error = min(max(current_kl / self.target - 1.0, -self.MAX_ERROR), self.MAX_ERROR)
        self.value *= 1.0 + error * n_steps / self.horizon


def get_kl_controller(
    kl_ctrl: KLControllerConfig | DictConfig | Mapping[str, Any],
) -> FixedKLController | AdaptiveKLController:
    """Return the controller of the coefficient of the KL in the reward."""
    config = as_config(KLControllerConfig, kl_ctrl)
    if config.type == "fixed":
        return FixedKLController(config.kl_coef)
    return AdaptiveKLController(config.kl_coef, config.target_kl, config.horizon)
