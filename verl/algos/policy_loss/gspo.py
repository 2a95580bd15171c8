"""`gspo`: the ratio of whole sequences, length-normalised, clipped as one (arXiv 2507.18071)."""

from __future__ import annotations

import torch

from verl.algos.policy_loss.common import clipped_surrogate, finish, loss_config, policy_terms
from verl.algos.registry import register_policy_loss
from verl.algos.types import ActorLike, PolicyLoss
from verl.utils.torch_functional import masked_mean


@register_policy_loss("gspo", paper="2507.18071", loss_agg_mode="seq-mean-token-mean", clip=(0.0003, 0.0004))
def compute_policy_loss_gspo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: ActorLike = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> PolicyLoss:
    """PPO's clip on s = (π(sequence) / π_old(sequence))^(1 / length); tensors [batch, response].

    The token form (GSPO-token): every token carries its sequence's s as value and its own log-prob's gradient, so
    advantages may differ along a sequence; where they do not, it is GSPO. The paper's distances are 3e-4 and 4e-4.
    The paper averages over sequences, seq-mean-token-mean; another `loss_agg_mode` is obeyed.
    """
    config = loss_config("gspo", config)
    terms = policy_terms(old_log_prob, log_prob, advantages, response_mask)
    sequence_log_ratio = masked_mean(terms.log_ratio.detach(), terms.mask, axis=-1)[:, None]
    ratio = torch.exp(sequence_log_ratio + terms.log_prob - terms.log_prob.detach())
    losses, clipped = clipped_surrogate(ratio, terms.advantages, config.clip_ratio_low, config.clip_ratio_high)
    metrics = {"clipfrac": clipped, "sequence_ratio": ratio}
    return finish(losses, terms, loss_agg_mode, config, rollout_is_weights, metrics)
