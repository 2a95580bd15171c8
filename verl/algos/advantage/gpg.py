"""`gpg`: score minus group mean, scaled up to compensate for groups with equal scores (arXiv 2504.02546)."""

from __future__ import annotations

import torch

from verl.algos.groups import Groups, Index
from verl.algos.registry import Advantages, AlgorithmLike, register_adv_est


@register_adv_est("gpg", uses_groups=True)
def compute_gpg_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Index,
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    config: AlgorithmLike = None,
) -> Advantages:
    """α (score - group mean) / `f_norm`, with α = responses / responses in groups whose scores differ.

    Groups with equal scores have no gradient but count in the mean over the batch, which α compensates. Scores count as
    equal if their range is at most `epsilon`.
    """
    groups = Groups(index, response_mask)
    scores = groups.scores(token_level_rewards)
    informative = groups.has_spread(scores, epsilon)
    alpha = groups.non_empty.sum() / informative.sum().clamp(min=1)
    advantages = groups.to_tokens(alpha * groups.centered(scores) / f_norm, like=token_level_rewards)
    return advantages, advantages
