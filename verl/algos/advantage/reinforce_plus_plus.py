"""`reinforce_plus_plus`: discounted returns, whitened over the batch, without a critic (arXiv 2501.03262)."""

from __future__ import annotations

import torch

from verl.algos.masked_ops import discounted_returns, whiten_
from verl.algos.registry import Advantages, AlgorithmLike, register_adv_est
from verl.config import AlgorithmConfig, as_config


@register_adv_est("reinforce_plus_plus", reads=("gamma",))
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    config: AlgorithmLike = None,
    gamma: float | None = None,
) -> Advantages:
    """Returns discounted by `gamma` (default: `config.gamma`) per model token; advantages are the whitened returns."""
    gamma = as_config(AlgorithmConfig, config).gamma if gamma is None else gamma
    mask = response_mask.bool()
    returns = discounted_returns(token_level_rewards, mask, gamma)
    return whiten_(returns.clone(), mask), returns
