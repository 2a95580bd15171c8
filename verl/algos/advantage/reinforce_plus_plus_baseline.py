"""`reinforce_plus_plus_baseline`: group mean as baseline, normalised over the whole batch (arXiv 2501.03262)."""

from __future__ import annotations

import torch

from verl.algos.groups import Groups, Index
from verl.algos.registry import register_adv_est
from verl.algos.types import Advantages, AlgorithmLike
from verl.algos.whiten import whiten_


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
    centred = groups.spread(groups.centred(scores), like=token_level_rewards)
    advantages = whiten_(centred, groups.mask)
    return advantages, advantages
