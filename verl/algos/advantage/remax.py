"""`remax`: returns minus the score of the greedy response to the same prompt (arXiv 2310.10505)."""

from __future__ import annotations

import torch

from verl.algos.masked_ops import apply_mask, discounted_returns
from verl.algos.registry import Advantages, AlgorithmLike, register_adv_est


@register_adv_est("remax")
def compute_remax_outcome_advantage(
    token_level_rewards: torch.Tensor,
    reward_baselines: torch.Tensor,
    response_mask: torch.Tensor,
    config: AlgorithmLike = None,
) -> Advantages:
    """Undiscounted returns minus `reward_baselines` [batch], the scores of the greedy responses."""
    returns = discounted_returns(token_level_rewards, response_mask, gamma=1.0)
    return apply_mask(returns - reward_baselines.to(returns)[:, None], response_mask.bool()), returns
