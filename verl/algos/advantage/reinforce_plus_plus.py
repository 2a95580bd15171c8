"""`reinforce_plus_plus`: discounted returns normalised over the whole batch, without a critic (arXiv 2501.03262)."""

from __future__ import annotations

import torch

from verl.algos.registry import register_adv_est
from verl.algos.returns import discounted_returns
from verl.algos.types import Advantages, AlgorithmLike
from verl.algos.whiten import whiten_
from verl.config import AlgorithmConfig, as_config


@register_adv_est("reinforce_plus_plus", reads=("gamma",))
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    config: AlgorithmLike = None,
    gamma: float | None = None,
) -> Advantages:
    """Reward from each token on, discounted by `gamma` (or `config.gamma`) per model token; whitened over the batch."""
    gamma = as_config(AlgorithmConfig, config).gamma if gamma is None else gamma
    mask = response_mask.bool()
    returns = discounted_returns(token_level_rewards, mask, gamma)
    return whiten_(returns.clone(), mask), returns
