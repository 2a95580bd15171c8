"""`gpg`: each answer against its group's mean, scaled up for groups that teach nothing (arXiv 2504.02546)."""

from __future__ import annotations

import torch

from verl.algos.groups import Groups, Index
from verl.algos.registry import register_adv_est
from verl.algos.types import Advantages, AlgorithmLike


@register_adv_est("gpg", uses_groups=True)
def compute_gpg_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Index,
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    config: AlgorithmLike = None,
) -> Advantages:
    """α (score - group mean) / `f_norm`, with α = answers / answers in groups whose scores differ.

    Groups with equal scores have no gradient but count in the mean over the batch; α undoes that. Scores within
    `epsilon` of each other count as equal.
    """
    groups = Groups(index, response_mask)
    scores = groups.scores(token_level_rewards)
    teaches = groups.differ(scores, epsilon)
    alpha = groups.real.sum() / teaches.sum().clamp(min=1)
    advantages = groups.spread(alpha * groups.centred(scores) / f_norm, like=token_level_rewards)
    return advantages, advantages
