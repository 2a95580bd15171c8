"""`gdpo`: several rewards, each normalized within its group before they are summed (arXiv 2601.05242)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verl.algos.groups import Groups, Index
from verl.algos.registry import Advantages, AlgorithmLike, register_adv_est

# Relative standard deviation below which rewards count as equal.
_MIN_RELATIVE_STD = 1e-6


@register_adv_est("gdpo", uses_groups=True, reads=("gdpo.*",))
def compute_gdpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Index,
    epsilon: float = 1e-6,
    reward_dimensions: torch.Tensor | None = None,
    reward_weights: Sequence[float] | None = None,
    config: AlgorithmLike = None,
) -> Advantages:
    """Σ over dimensions of weight × (reward - group mean) / (group std + epsilon), then normalized over the batch.

    `reward_dimensions` [batch, dimensions]: the rewards; by default the score is the only one. If the rewards were
    summed before they are normalized, combinations with the same sum would get the same advantage.
    """
    groups = Groups(index, response_mask)
    if reward_dimensions is None:
        reward_dimensions = groups.scores(token_level_rewards)[:, None]
    dimensions = reward_dimensions.double().unbind(dim=-1)
    weights = [1.0] * len(dimensions) if reward_weights is None else list(reward_weights)
    if len(weights) != len(dimensions):
        raise ValueError(f"reward_weights: {len(weights)} weights for {len(dimensions)} rewards. Pass one for each.")
    total = torch.zeros_like(groups.size)
    for rewards, weight in zip(dimensions, weights, strict=True):
        std = groups.std(rewards)
        # Equal rewards differ from their mean by rounding errors, which the division by epsilon would amplify.
        differ = std > _MIN_RELATIVE_STD * rewards.abs().max().clamp(min=1.0)
        total += torch.where(differ, weight * groups.centered(rewards) / (std + epsilon), 0.0)
    rows = groups.non_empty.sum()
    centered = torch.where(groups.non_empty, total - total.sum() / rows.clamp(min=1), 0.0)
    std = (centered.square().sum() / (rows - 1).clamp(min=1)).sqrt()
    normalized = centered / (std + epsilon)
    advantages = groups.to_tokens(normalized, like=token_level_rewards)
    return advantages, advantages
