"""How far two policies are apart, estimated from the log-probs of the sampled tokens.

With d = log p - log q on tokens sampled from p: k1 = d, k2 = d² / 2, k3 = exp(-d) - 1 + d (J. Schulman, "Approximating
KL divergence"). As values k1 and k3 have the mean KL(p || q). As losses they do not have its gradient: on tokens
sampled from p that of k1 is 0 on average and that of k3 is KL(q || p)'s, while k2's is exactly KL(p || q)'s
(arXiv 2510.01555). A trailing "+" therefore keeps an estimate's value and takes k2's gradient, and so does the plain
name "kl": whoever adds "the KL" to a loss means its gradient. Its value is k1's, and without a gradient it is k1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from verl.algos.aggregate import agg_loss
from verl.algos.returns import keep

# Of a token that cannot occur: exp of it is 0, and 0 times it is 0.
_LOWEST = -1e4
# Where K tokens have all the probability, what is left is rounding.
_LEAST_REST = 1e-7
# exp of more than this says "unrelated" and no longer how much; it also keeps a stray token finite.
MAX_LOG_RATIO = 20.0


def kl_penalty(logprob: torch.Tensor, ref_logprob: torch.Tensor, kl_penalty: str) -> torch.Tensor:
    """KL(policy || reference) per token, in the shape of the inputs; `kl_penalty` is a name of `KL_ESTIMATES`.

    `kl` and the names with a trailing + have the gradient of KL(policy || reference) on average over tokens sampled
    from the policy, `k2` too; `k1` has none, `k3` that of KL(reference || policy). Values are those of the estimate.
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
    return estimate.detach() + (unbiased - unbiased.detach())  # + 0: the value stays the estimate's to the bit


def compute_kl_loss(
    log_prob: torch.Tensor,
    ref_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    kl_loss_type: str = "low_var_kl",
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
) -> torch.Tensor:
    """The KL to the reference as a loss; all tensors [batch, response]. Masked tokens may hold anything."""
    mask = response_mask.bool()
    divergence = kl_penalty(keep(log_prob, mask), keep(ref_log_prob, mask), kl_loss_type)
    return agg_loss(divergence, response_mask, loss_agg_mode, loss_scale_factor=loss_scale_factor)


def top_k_kl(log_prob: torch.Tensor, ref_log_prob: torch.Tensor, kind: str) -> torch.Tensor:
    """The KL of two distributions over K tokens and, as one more, all others: [..., K] log-probs of the same tokens ->
    [...]. `kind` is a name of `TOP_K_KLS`: which of the two the mean is taken over.

    Tokens put together can only look more alike: it is at most the KL over the whole vocabulary. Its gradient is exact.
    """
    mine, other = (_with_the_rest(value) for value in (log_prob, ref_log_prob))
    weighs = mine if TOP_K_KLS[kind] else other
    return (weighs.exp() * (mine - other if TOP_K_KLS[kind] else other - mine)).sum(-1)


def _with_the_rest(log_probs: torch.Tensor) -> torch.Tensor:
    """[..., K] -> [..., K + 1]: the last is the log-prob of all other tokens. What cannot occur is finite, too."""
    log_probs = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32)).clamp(min=_LOWEST)
    rest = (1.0 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=_LEAST_REST)
    return torch.cat([log_probs, rest.log()], dim=-1)


def _k1(difference: torch.Tensor) -> torch.Tensor:
    return difference


def _k2(difference: torch.Tensor) -> torch.Tensor:
    return 0.5 * difference**2


def _k3(difference: torch.Tensor) -> torch.Tensor:
    bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-bounded) + bounded


TOP_K_KLS = {"reverse_kl_topk": True, "forward_kl_topk": False}
"""Whether the mean is over the policy, KL(policy || reference), or over the reference."""

KL_ESTIMATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "kl": _k1,
    "k1": _k1,
    "abs": torch.abs,
    "mse": _k2,
    "k2": _k2,
    "low_var_kl": _k3,
    "k3": _k3,
}
