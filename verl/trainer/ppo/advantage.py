"""The controller's own arithmetic: KL in the reward, advantages, the response mask."""

from __future__ import annotations

from typing import Any

import torch

from verl.algos import estimate_advantages
from verl.algos import kl_penalty as kl_estimate
from verl.config import AlgorithmConfig, as_config
from verl.protocol import DataProto
from verl.utils.torch_functional import masked_mean


def compute_response_mask(data: DataProto) -> torch.Tensor:
    """[batch, response]: the attention mask over the responses (for batches whose rollout gave no mask)."""
    width = data.batch["responses"].shape[1]
    return data.batch["attention_mask"][:, -width:]


def apply_kl_penalty(data: DataProto, kl_ctrl: Any, kl_penalty: str = "kl") -> tuple[DataProto, dict[str, float]]:
    """`token_level_rewards` = `token_level_scores` - coefficient × KL(policy ‖ reference); moves the controller."""
    mask = data.batch["response_mask"]
    estimate = kl_estimate(data.batch["old_log_probs"], data.batch["ref_log_prob"], kl_penalty)
    kl = torch.where(mask.bool(), estimate, 0.0)
    coefficient = kl_ctrl.value
    data.batch["token_level_rewards"] = data.batch["token_level_scores"] - coefficient * kl
    per_sequence = float(masked_mean(kl, mask, axis=-1).mean())
    kl_ctrl.update(current_kl=per_sequence, n_steps=len(data))
    return data, {"actor/reward_kl_penalty": per_sequence, "actor/reward_kl_penalty_coeff": coefficient}


def compute_advantage(
    data: DataProto,
    adv_estimator: str,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> DataProto:
    """Add `advantages` and `returns`: [batch, response]. `num_repeat` is accepted for older callers; groups are told by
    `uid`."""
    if "response_mask" not in data.batch.keys():
        data.batch["response_mask"] = compute_response_mask(data)
    algorithm = as_config(AlgorithmConfig, config)
    tensors, arrays = data.batch, data.non_tensor_batch
    advantages, returns = estimate_advantages(
        adv_estimator,
        token_level_rewards=tensors["token_level_rewards"],
        response_mask=tensors["response_mask"],
        values=tensors["values"] if "values" in tensors.keys() else None,
        reward_baselines=tensors["reward_baselines"] if "reward_baselines" in tensors.keys() else None,
        index=arrays["uid"] if "uid" in arrays else None,
        gamma=gamma,
        lam=lam,
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
        config=algorithm,
    )
    data.batch["advantages"], data.batch["returns"] = advantages, returns
    return data
