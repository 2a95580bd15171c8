"""`gspo`: PPO clip of the length-normalized ratio of whole sequences (arXiv 2507.18071)."""

from __future__ import annotations

import torch

from verl.algos.losses import aggregate, clipped_surrogate, loss_config, mask_inputs
from verl.algos.registry import ActorLike, PolicyLoss, register_policy_loss
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

    GSPO-token: the ratio of each token has the value s of its sequence and the gradient of its own log-prob, so that
    advantages may differ within a sequence; if they do not, it equals GSPO. The paper's clip ratios are 3e-4 and 4e-4.
    The paper averages over sequences, seq-mean-token-mean; other modes are possible.
    """
    config = loss_config("gspo", config)
    inputs = mask_inputs(old_log_prob, log_prob, advantages, response_mask)
    sequence_log_ratio = masked_mean(inputs.log_ratio.detach(), inputs.mask, axis=-1)[:, None]
    ratio = torch.exp(sequence_log_ratio + inputs.log_prob - inputs.log_prob.detach())
    losses, clipped = clipped_surrogate(ratio, inputs.advantages, config.clip_ratio_low, config.clip_ratio_high)
    metrics = {"clipfrac": clipped, "sequence_ratio": ratio}
    return aggregate(losses, inputs, loss_agg_mode, config, rollout_is_weights, metrics)
