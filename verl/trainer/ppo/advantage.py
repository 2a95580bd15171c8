"""Token-level rewards (with KL penalties), advantages and returns, computed on the controller."""

from __future__ import annotations

import math
import numbers
from collections.abc import Container
from typing import Any

import numpy as np
import torch

from verl.algos import estimate_advantages, takes_argument
from verl.algos import kl_penalty as kl_estimate
from verl.algos.groups import Trajectories
from verl.config import AlgorithmConfig, PPOConfig, as_config
from verl.config.ppo import DistillationConfig, DistillationLossConfig
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import compute_data_metrics, truncated_rows
from verl.trainer.ppo.mismatch import RolloutMismatch
from verl.trainer.ppo.row_balancing import local_columns
from verl.types.schema import columns_read_by
from verl.utils.torch_functional import masked_mean, masked_sum

_NUMBER = (numbers.Real, np.bool_)


def compute_response_mask(data: DataProto) -> torch.Tensor:
    """Return the attention mask of the responses [batch, response], for batches without `response_mask`."""
    width = data.batch["responses"].shape[1]
    return data.batch["attention_mask"][:, -width:]


def check_bootstrap(algorithm: AlgorithmConfig) -> None:
    """Raise ValueError for `truncated_responses=bootstrap` with an estimator that takes no value after the end."""
    estimator = algorithm.adv_estimator
    if algorithm.truncated_responses == "bootstrap" and not takes_argument(estimator, "last_value"):
        raise ValueError(
            f"algorithm.truncated_responses=bootstrap: the estimator {estimator} does not take last_value. Add"
            " this parameter, [batch], to it, or set the key to mask or keep."
        )


def add_advantage_columns(
    batch: DataProto, config: PPOConfig, mismatch: RolloutMismatch, kl_controller: Any, use_critic: bool
) -> dict[str, float]:
    """Add `token_level_rewards` (with the KL penalty, if configured), `advantages` and `returns`, the weights of the
    rollout correction and the mask of truncated responses; return the metrics of the batch."""
    algorithm, data = config.algorithm, config.data
    compares = not algorithm.rollout_correction.bypass_mode  # otherwise `add_old_log_probs` has compared them
    names = columns_read_by("advantage", "correction") if compares else columns_read_by("advantage")
    rewards = [reward_column(batch.non_tensor_batch, name) for name in algorithm.gdpo.reward_keys]
    local = local_columns(batch, names, (*names, *rewards))
    metrics = add_advantages(local, algorithm, kl_controller, config.distillation)
    for name in ("token_level_rewards", "advantages", "returns"):
        batch.batch[name] = local.batch[name]
    if compares and "old_log_probs" in local.batch.keys():
        metrics |= mismatch.correct(batch, local)
    elif compares:
        mismatch.add_denominator(batch, local)
    if algorithm.truncated_responses == "mask":
        batch.batch["response_mask"] = batch.batch["response_mask"] * ~truncated_rows(local)[:, None]
    local.meta_info |= {
        "max_response_length": data.max_response_length,
        "max_prompt_length": data.max_prompt_length,
    }
    local = local.union(local_columns(batch, ("attention_mask",), ("num_turns",)))
    return metrics | compute_data_metrics(local, use_critic)


def add_advantages(
    data: DataProto, algorithm: AlgorithmConfig, kl_ctrl: Any, distillation: DistillationConfig | None = None
) -> dict[str, float]:
    """Add `token_level_rewards` (with the configured KL penalties), `advantages` and `returns`; return metrics.

    If only the distillation loss is trained, advantages and returns are 0.
    """
    metrics: dict[str, float] = {}
    if algorithm.use_kl_in_reward:
        data, metrics = apply_kl_penalty(data, kl_ctrl, algorithm.kl_penalty)
    else:
        data.batch["token_level_rewards"] = data.batch["token_level_scores"]
    if distillation is not None and distillation.enabled and distillation.distillation_loss.as_reward:
        add_teacher_reward(data, distillation.distillation_loss)
    if distillation is not None and not distillation.has_advantages:
        for name in ("advantages", "returns"):
            data.batch[name] = torch.zeros_like(data.batch["token_level_rewards"])
        return metrics
    compute_advantage(
        data,
        algorithm.adv_estimator,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        config=algorithm,
    )
    return metrics


def add_teacher_reward(data: DataProto, config: DistillationLossConfig) -> None:
    """Subtract coefficient × KL(student ‖ teacher) of each token from its `token_level_rewards`."""
    columns = data.batch
    kl = kl_estimate(columns["old_log_probs"], columns["teacher_log_prob"], config.loss_mode)
    kl = torch.where(columns["response_mask"].bool(), kl, 0.0)
    columns["token_level_rewards"] = columns["token_level_rewards"] - config.distillation_loss_coef * kl


def apply_kl_penalty(data: DataProto, kl_ctrl: Any, kl_penalty: str = "kl") -> tuple[DataProto, dict[str, float]]:
    """Add `token_level_rewards` = `token_level_scores` - coefficient × KL(policy ‖ reference); update `kl_ctrl`."""
    mask = data.batch["response_mask"]
    estimate = kl_estimate(data.batch["old_log_probs"], data.batch["ref_log_prob"], kl_penalty)
    kl = torch.where(mask.bool(), estimate, 0.0)
    coefficient = kl_ctrl.value
    data.batch["token_level_rewards"] = data.batch["token_level_scores"] - coefficient * kl
    trajectories = Trajectories.of(data)
    real = trajectories.mask.any(-1)  # fillers have no tokens
    mean_kl = float(masked_mean(masked_mean(trajectories.join(kl), trajectories.mask, axis=-1), real))
    kl_ctrl.update(current_kl=mean_kl, n_steps=int(real.sum()))
    return data, {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": coefficient}


def compute_advantage(
    data: DataProto,
    adv_estimator: str,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> DataProto:
    """Add `advantages` and `returns` [batch, response]. The estimator receives whole trajectories, one per row.

    `num_repeat` is accepted for compatibility and ignored: groups are defined by `uid`.
    """
    if "response_mask" not in data.batch.keys():
        data.batch["response_mask"] = compute_response_mask(data)
    algorithm = as_config(AlgorithmConfig, config)
    tensors, arrays = data.batch, data.non_tensor_batch
    dimensions = None
    if algorithm.gdpo.reward_keys and takes_argument(adv_estimator, "reward_dimensions"):
        names, key = algorithm.gdpo.reward_keys, "algorithm.gdpo.reward_keys"
        dimensions = torch.stack([trajectory_values(data, name, key) for name in names], dim=-1)
    trajectories = Trajectories.of(data)

    def at_end(name: str) -> torch.Tensor | None:
        return trajectories.at_last_row(tensors[name]) if name in tensors.keys() else None

    last_value = at_end("last_value")
    if last_value is not None:  # the value after a response is 0, unless the response was truncated
        last_value = torch.where(trajectories.at_last_row(truncated_rows(data)), last_value, 0.0)
    advantages, returns = estimate_advantages(
        adv_estimator,
        token_level_rewards=trajectories.join(tensors["token_level_rewards"]),
        response_mask=trajectories.mask,
        values=trajectories.join(tensors["values"]) if "values" in tensors.keys() else None,
        last_value=last_value,
        reward_baselines=at_end("reward_baselines"),
        reward_dimensions=dimensions,
        reward_weights=algorithm.gdpo.reward_weights or None,
        index=arrays["uid"][trajectories.last_rows] if "uid" in arrays else None,
        gamma=gamma,
        lam=lam,
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
        config=algorithm,
    )
    data.batch["advantages"], data.batch["returns"] = trajectories.split(advantages), trajectories.split(returns)
    return data


def trajectory_values(data: DataProto, name: str, key: str) -> torch.Tensor:
    """Return the value `name` of the reward function for each trajectory: [trajectories]; `score` is the total score.

    `key`: configuration key that names it, for errors. Trajectories that could not be scored have 0.
    """
    trajectories = Trajectories.of(data)
    if name == "score":
        return masked_sum(trajectories.join(data.batch["token_level_scores"]), trajectories.mask, axis=-1).double()
    columns = data.non_tensor_batch
    name = reward_column(columns, name)
    if name not in columns or not all(value is None or isinstance(value, _NUMBER) for value in columns[name]):
        known = [other for other in columns if len(columns[other]) and isinstance(columns[other][0], _NUMBER)]
        raise ValueError(
            f"{key}: the reward function returned no number {name!r} (available: score, {', '.join(sorted(known))})."
            " Use one of these, or return it from the reward function in a dict."
        )
    values = [
        0.0 if value is None or math.isnan(value) else float(value) for value in columns[name][trajectories.last_rows]
    ]
    return torch.tensor(values, dtype=torch.float64)


def reward_column(columns: Container[str], name: str) -> str:
    """Return the column of the value `name` of the reward function: `reward_<name>` if the data has a column `name` too
    (see `score_responses`)."""
    renamed = f"reward_{name}"
    return renamed if name in columns and renamed in columns else name
