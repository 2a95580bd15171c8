"""`opo`: score minus the length-weighted group mean, the minimum-variance baseline (arXiv 2505.23585)."""

from __future__ import annotations

import torch

from verl.algos.groups import Groups, Index
from verl.algos.registry import Advantages, AlgorithmLike, register_adv_est


@register_adv_est("opo", uses_groups=True)
def compute_opo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Index,
    epsilon: float = 1e-6,
    config: AlgorithmLike = None,
) -> Advantages:
    """score - Σ length × score / Σ length over the group; length: number of model tokens. `epsilon` is not used."""
    groups = Groups(index, response_mask)
    scores = groups.scores(token_level_rewards)
    lengths = groups.mask.sum(dim=-1).double()
    baseline = groups.sum(lengths * scores) / groups.sum(lengths).clamp(min=1.0)
    advantages = groups.to_tokens(scores - baseline, like=token_level_rewards)
    return advantages, advantages
