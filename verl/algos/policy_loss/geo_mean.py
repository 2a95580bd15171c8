"""`geo_mean`: the geometric mean of a sequence's token ratios, each clipped in log space (GMPO, 2507.20673)."""

from __future__ import annotations

import torch

from verl.algos.losses import aggregate, loss_config, mask_inputs
from verl.algos.registry import ActorLike, PolicyLoss, register_policy_loss
from verl.utils.torch_functional import masked_mean


@register_policy_loss("geo_mean", paper="2507.20673", loss_agg_mode="seq-mean-token-mean", clip=(0.4, 0.4))
def compute_policy_loss_geo_mean(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: ActorLike = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> PolicyLoss:
    """-A × (Π ratio)^(1 / length) per sequence; tensors [batch, response].

    The token log-ratio is clipped at `clip_ratio_high` if A > 0 and at -`clip_ratio_low` otherwise, the sides that PPO
    clips (the paper: 0.4). The paper averages over sequences, seq-mean-token-mean; other modes are possible.
    """
    config = loss_config("geo_mean", config)
    inputs = mask_inputs(old_log_prob, log_prob, advantages, response_mask)
    positive = inputs.advantages > 0
    clipped = torch.where(
        positive, inputs.log_ratio.clamp(max=config.clip_ratio_high), inputs.log_ratio.clamp(min=-config.clip_ratio_low)
    )
    sequence_ratio = masked_mean(clipped, inputs.mask, axis=-1).exp()[:, None]
    losses = -inputs.advantages * sequence_ratio
    metrics = {"clipfrac": clipped != inputs.log_ratio, "sequence_ratio": sequence_ratio.expand_as(losses)}
    return aggregate(losses, inputs, loss_agg_mode, config, rollout_is_weights, metrics)
