"""`rloo`: score minus the mean score of the other responses of its group (leave-one-out, arXiv 2402.14740)."""

from __future__ import annotations

import torch

from verl.algos.groups import Groups, Index
from verl.algos.registry import Advantages, AlgorithmLike, register_adv_est


@register_adv_est("rloo", uses_groups=True)
def compute_rloo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Index,
    epsilon: float = 1e-6,
    config: AlgorithmLike = None,
) -> Advantages:
    """score - mean of the others = n / (n - 1) × (score - group mean); 0 in a group of one. `epsilon` is not used."""
    groups = Groups(index, response_mask)
    scores = groups.scores(token_level_rewards)
    leave_one_out = groups.centered(scores) * groups.size / (groups.size - 1).clamp(min=1.0)
    advantages = groups.to_tokens(leave_one_out, like=token_level_rewards)
    return advantages, advantages
