"""`remax`: each answer against the greedy answer to the same prompt (arXiv 2310.10505)."""

from __future__ import annotations

import torch

from verl.algos.registry import register_adv_est
from verl.algos.returns import discounted_returns, keep
from verl.algos.types import Advantages, AlgorithmLike


@register_adv_est("remax")
def compute_remax_outcome_advantage(
    token_level_rewards: torch.Tensor,
    reward_baselines: torch.Tensor,
    response_mask: torch.Tensor,
    config: AlgorithmLike = None,
) -> Advantages:
    """Reward from each token on, minus the score of the greedy answer, `reward_baselines` [batch]."""
    returns = discounted_returns(token_level_rewards, response_mask, gamma=1.0)
    return keep(returns - reward_baselines.to(returns)[:, None], response_mask.bool()), returns
