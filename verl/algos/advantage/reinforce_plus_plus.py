"""`reinforce_plus_plus`: discounted returns normalised over the whole batch, without a critic (arXiv 2501.03262)."""

from __future__ import annotations

import torch

from verl.algos.registry import register_adv_est
from verl.algos.returns import discounted_returns
from verl.algos.types import Advantages, AlgorithmLike
from verl.config import AlgorithmConfig, as_config
from verl.utils.torch_functional import masked_whiten


@register_adv_est("reinforce_plus_plus")
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    config: AlgorithmLike = None,
    gamma: float | None = None,
) -> Advantages:
    """Reward from each token on, discounted by `gamma` (or `config.gamma`) per model token; whitened over the batch."""
    gamma = as_config(AlgorithmConfig, config).gamma if gamma is None else gamma
    returns = discounted_returns(token_level_rewards, response_mask, gamma)
    return masked_whiten(returns, response_mask), returns
