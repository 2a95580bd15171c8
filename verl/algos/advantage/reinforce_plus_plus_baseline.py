"""`reinforce_plus_plus_baseline`: score minus group mean, whitened over the batch (arXiv 2501.03262)."""

from __future__ import annotations

import torch

from verl.algos.groups import Groups, Index
from verl.algos.masked_ops import whiten_
from verl.algos.registry import Advantages, AlgorithmLike, register_adv_est


@register_adv_est("reinforce_plus_plus_baseline", uses_groups=True)
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Index,
    epsilon: float = 1e-6,
    config: AlgorithmLike = None,
) -> Advantages:
    """score - group mean on every token, whitened over all model tokens of the batch. `epsilon` is not used."""
    groups = Groups(index, response_mask)
    scores = groups.scores(token_level_rewards)
    centered = groups.to_tokens(groups.centered(scores), like=token_level_rewards)
    advantages = whiten_(centered, groups.mask)
    return advantages, advantages
