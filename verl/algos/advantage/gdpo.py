"""`gdpo`: several rewards, each normalised within its group before they are added (arXiv 2601.05242)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verl.algos.groups import Groups, Index
from verl.algos.registry import register_adv_est
from verl.algos.types import Advantages, AlgorithmLike

_ROUNDING = 1e-6


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
    """Σ over dimensions of weight × (reward - group mean) / (group std + epsilon), then normalised over the batch.

    `reward_dimensions` [batch, dimensions] holds the rewards to keep apart; without them the score is the only one.
    Normalised after adding them, different combinations with the same sum would get the same advantage.
    """
    groups = Groups(index, response_mask)
    if reward_dimensions is None:
        reward_dimensions = groups.scores(token_level_rewards)[:, None]
    dimensions = reward_dimensions.double().unbind(dim=-1)
    weights = [1.0] * len(dimensions) if reward_weights is None else list(reward_weights)
    if len(weights) != len(dimensions):
        raise ValueError(f"reward_weights: {len(weights)} weights for {len(dimensions)} rewards. Give one for each.")
    total = torch.zeros_like(groups.size)
    for rewards, weight in zip(dimensions, weights, strict=True):
        std = groups.std(rewards)
        # Equal rewards differ from their mean by rounding only; dividing by epsilon twice would blow that up.
        differ = std > _ROUNDING * rewards.abs().max().clamp(min=1.0)
        total += torch.where(differ, weight * groups.centred(rewards) / (std + epsilon), 0.0)
    rows = groups.real.sum()
    centred = torch.where(groups.real, total - total.sum() / rows.clamp(min=1), 0.0)
    std = (centred.square().sum() / (rows - 1).clamp(min=1)).sqrt()
    normalised = centred / (std + epsilon)
    advantages = groups.spread(normalised, like=token_level_rewards)
    return advantages, advantages
