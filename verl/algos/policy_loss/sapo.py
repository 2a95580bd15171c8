"""`sapo`: a sigmoid gate on the ratio instead of a clip (arXiv 2511.20347)."""

from __future__ import annotations

import torch

from verl.algos.losses import aggregate, loss_config, mask_inputs
from verl.algos.registry import ActorLike, PolicyLoss, register_policy_loss


@register_policy_loss(
    "sapo", paper="2511.20347", loss_agg_mode="seq-mean-token-mean", clip=None, reads=("policy_loss.tau_*",)
)
def compute_policy_loss_sapo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: ActorLike = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> PolicyLoss:
    """Aggregate -A × (4 / τ) σ(τ (ratio - 1)) over tokens. Tensors are [batch, response].

    The temperature τ is `policy_loss.tau_pos` if A > 0, otherwise `policy_loss.tau_neg`. At ratio 1 the gradient is
    that of PPO; it decreases smoothly with the distance of the ratio from 1, faster with a larger τ. As in the paper,
    the default aggregation is seq-mean-token-mean.
    """
    config = loss_config("sapo", config)
    inputs = mask_inputs(old_log_prob, log_prob, advantages, response_mask)
    temperatures = inputs.advantages.new_tensor([config.policy_loss.tau_pos, config.policy_loss.tau_neg])
    tau = torch.where(inputs.advantages > 0, *temperatures)
    gate = 4.0 / tau * torch.sigmoid(tau * (inputs.log_ratio.exp() - 1.0))
    losses = -inputs.advantages * gate
    return aggregate(losses, inputs, loss_agg_mode, config, rollout_is_weights, {})
