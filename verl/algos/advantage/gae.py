"""`gae`: generalised advantage estimation with a critic (arXiv 1506.02438)."""

from __future__ import annotations

import torch

from verl.algos.registry import register_adv_est
from verl.algos.returns import batch_major, scan_back, time_major, where_model
from verl.algos.types import Advantages
from verl.algos.whiten import whiten_


@register_adv_est("gae", needs_critic=True, reads=("gamma", "lam"))
def compute_gae_advantage_return(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float,
    lam: float,
    last_value: torch.Tensor | None = None,
) -> Advantages:
    """Advantages (whitened over the batch, as PPO uses them) and the returns that the critic learns.

    All [batch, response]. δ_t = r_t + γ V_next - V_t and A_t = δ_t + γ λ A_next, where next is the model's next token:
    observations between two turns are passed over. After the last token A is 0, and V is 0 or `last_value` [batch]:
    what the critic expects of an answer that was cut there.
    """
    mask = response_mask.bool()
    mask_TB = mask.t().contiguous()
    values_TB = time_major(values, mask_TB)
    # The value at each position, or at the model's next one; shifted by one it is what follows each token.
    following_TB = scan_back(values_TB.clone(), where_model(mask_TB, 0.0, 1.0, values))
    advantages_TB = time_major(token_level_rewards, mask_TB).sub_(values_TB)
    advantages_TB[:-1].add_(following_TB[1:], alpha=gamma)
    del following_TB
    if last_value is not None:
        rows = mask.any(dim=-1).nonzero().squeeze(-1)
        last = (mask * torch.arange(mask.shape[1], device=mask.device)).amax(dim=-1)[rows]
        advantages_TB[last, rows] += gamma * last_value.to(advantages_TB)[rows]
    advantages_TB.masked_fill_(~mask_TB, 0.0)
    scan_back(advantages_TB, where_model(mask_TB, gamma * lam, 1.0, token_level_rewards))
    advantages_TB.masked_fill_(~mask_TB, 0.0)
    returns = batch_major(values_TB.add_(advantages_TB))
    return whiten_(batch_major(advantages_TB), mask), returns
