"""`gae`: generalised advantage estimation with a critic (arXiv 1506.02438)."""

from __future__ import annotations

import torch

from verl.algos.masked_ops import batch_major, model_token_factors, reverse_scan, time_major, whiten_
from verl.algos.registry import Advantages, register_adv_est


@register_adv_est("gae", needs_critic=True, reads=("gamma", "lam"))
def compute_gae_advantage_return(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float,
    lam: float,
    last_value: torch.Tensor | None = None,
) -> Advantages:
    """Return advantages, whitened over the batch as in PPO, and returns, the targets of the critic.

    All [batch, response]. δ_t = r_t + γ V_next - V_t and A_t = δ_t + γ λ A_next, where next is the next model token
    (observations between two turns are skipped). After the last token A is 0, and V is 0, or `last_value` [batch], the
    critic's value of the state after a truncated response.
    """
    mask = response_mask.bool()
    mask_TB = mask.t().contiguous()
    values_TB = time_major(values, mask_TB)
    # Value of each position, or of the next model token; shifted by one, it is the value of the next state.
    next_values_TB = reverse_scan(values_TB.clone(), model_token_factors(mask_TB, 0.0, 1.0, values))
    advantages_TB = time_major(token_level_rewards, mask_TB).sub_(values_TB)
    advantages_TB[:-1].add_(next_values_TB[1:], alpha=gamma)
    del next_values_TB
    if last_value is not None:
        rows = mask.any(dim=-1).nonzero().squeeze(-1)
        last = (mask * torch.arange(mask.shape[1], device=mask.device)).amax(dim=-1)[rows]
        advantages_TB[last, rows] += gamma * last_value.to(advantages_TB)[rows]
    advantages_TB.masked_fill_(~mask_TB, 0.0)
    reverse_scan(advantages_TB, model_token_factors(mask_TB, gamma * lam, 1.0, token_level_rewards))
    advantages_TB.masked_fill_(~mask_TB, 0.0)
    returns = batch_major(values_TB.add_(advantages_TB))
    return whiten_(batch_major(advantages_TB), mask), returns
