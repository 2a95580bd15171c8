"""`grpo_passk`: how much each response increases the maximum score of its group, for pass@k (arXiv 2503.19595)."""

from __future__ import annotations

import torch

from verl.algos.advantage.grpo import divide_by_std
from verl.algos.groups import Groups, Index
from verl.algos.registry import Advantages, AlgorithmLike, register_adv_est


@register_adv_est("grpo_passk", uses_groups=True, reads=("norm_adv_by_std_in_grpo",))
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: AlgorithmLike = None,
) -> Advantages:
    """The unique best response of a group gets its score minus the second-best score, all others 0.

    Divided by the group's standard deviation with `norm_adv_by_std_in_grpo`. If several responses are best, all get 0.
    """
    groups = Groups(index, response_mask)
    scores = groups.scores(token_level_rewards)
    best = groups.max(scores)
    is_best = scores == best
    runner_up = groups.max(scores, among=~is_best)
    unique_best = is_best & (groups.sum(is_best.double()) == 1) & runner_up.isfinite()
    lead = torch.where(unique_best, scores - runner_up, 0.0)
    if divide_by_std(norm_adv_by_std_in_grpo, config):
        lead = lead / (groups.std(scores) + epsilon)
    advantages = groups.to_tokens(lead, like=token_level_rewards)
    return advantages, advantages
