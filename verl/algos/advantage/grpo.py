"""`grpo`: each answer against the mean of its group (arXiv 2402.03300); without the std Dr. GRPO (2503.20783)."""

from __future__ import annotations

import torch

from verl.algos.groups import Groups, Index
from verl.algos.registry import register_adv_est
from verl.algos.types import Advantages, AlgorithmLike
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
    """(score - group mean) / (group std + epsilon), or the numerator alone without `norm_adv_by_std_in_grpo`.

    Rewards and mask [batch, response], `index` one prompt id per row. Rewards 1, 0, 1, 0 give ±0.5, with std ±0.866.
    """
    groups = Groups(index, response_mask)
    scores = groups.scores(token_level_rewards)
    advantages = groups.centred(scores)
    if divide_by_std(norm_adv_by_std_in_grpo, config):
        advantages = advantages / (groups.std(scores) + epsilon)
    advantages = groups.spread(advantages, like=token_level_rewards)
    return advantages, advantages


def divide_by_std(given: bool | None, config: AlgorithmLike) -> bool:
    """The argument where there is one, else the configuration."""
    return as_config(AlgorithmConfig, config).norm_adv_by_std_in_grpo if given is None else given
