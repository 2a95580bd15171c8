"""`grpo`: score minus group mean, divided by the group std (arXiv 2402.03300) or not (Dr. GRPO, 2503.20783)."""

from __future__ import annotations

import torch

from verl.algos.groups import Groups, Index
from verl.algos.registry import Advantages, AlgorithmLike, register_adv_est
from verl.config import AlgorithmConfig, as_config


@register_adv_est("grpo", uses_groups=True, reads=("norm_adv_by_std_in_grpo",))
def compute_grpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: AlgorithmLike = None,
) -> Advantages:
    """(score - group mean) / (group std + epsilon); only the numerator if `norm_adv_by_std_in_grpo` is False.

    Rewards and mask [batch, response]; `index`: one prompt id per row. Scores 1, 0, 1, 0 result in ±0.866, or in ±0.5
    without the division.
    """
    groups = Groups(index, response_mask)
    scores = groups.scores(token_level_rewards)
    advantages = groups.centered(scores)
    if divide_by_std(norm_adv_by_std_in_grpo, config):
        advantages = advantages / (groups.std(scores) + epsilon)
    advantages = groups.to_tokens(advantages, like=token_level_rewards)
    return advantages, advantages


def divide_by_std(argument: bool | None, config: AlgorithmLike) -> bool:
    """Return the argument `norm_adv_by_std_in_grpo`, or the value of the configuration if it is None."""
    return as_config(AlgorithmConfig, config).norm_adv_by_std_in_grpo if argument is None else argument
