"""The controller's own arithmetic: KL in the reward, advantages, the response mask."""

from __future__ import annotations

import math
import numbers
from collections.abc import Container
from typing import Any

import numpy as np
import torch

from verl.algos import estimate_advantages, takes_argument
from verl.algos import kl_penalty as kl_estimate
from verl.algos.trajectories import Trajectories
from verl.config import AlgorithmConfig, as_config
from verl.config.distillation import DistillationConfig, DistillationLossConfig
from verl.protocol import DataProto
from verl.utils.torch_functional import masked_mean, masked_sum


def compute_response_mask(data: DataProto) -> torch.Tensor:
    """[batch, response]: the attention mask over the responses (for batches whose rollout gave no mask)."""
    width = data.batch["responses"].shape[1]
    return data.batch["attention_mask"][:, -width:]


def cut_answers(data: DataProto) -> torch.Tensor:
    """[batch], bool: rows of trajectories that a limit ended, by the `finish_reason` of their last row."""
    whole = Trajectories.of(data)
    if "finish_reason" not in data.non_tensor_batch:
        raise ValueError(
            "algorithm.truncated_responses: the rollout does not say what ended its answers: the batch has no column"
            " finish_reason. Set it to keep, or let the rollout give that column."
        )
    ends = np.array([reason == "length" for reason in data.non_tensor_batch["finish_reason"]], dtype=bool)
    return torch.from_numpy(ends[whole.last_rows][whole.of_row])


def check_bootstrap(algorithm: AlgorithmConfig) -> None:
    """Refuse `truncated_responses=bootstrap` with an estimator that knows nothing of a value after the end."""
    estimator = algorithm.adv_estimator
    if algorithm.truncated_responses == "bootstrap" and not takes_argument(estimator, "last_value"):
        raise ValueError(
            f"algorithm.truncated_responses=bootstrap: the estimator {estimator} does not take last_value. Give it"
            " that argument, [batch], or set the key to mask or keep."
        )


def add_advantages(
    data: DataProto, algorithm: AlgorithmConfig, kl_ctrl: Any, distillation: DistillationConfig | None = None
) -> dict[str, float]:
    """`token_level_rewards`, with the KLs in them that are asked for, `advantages` and `returns` into `data`; metrics.

    Where the teachers' loss is all that is learned from, there are no advantages: they are 0.
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
    """`token_level_rewards` less coefficient × KL(student ‖ teacher), each token's on itself."""
    columns = data.batch
    kl = kl_estimate(columns["old_log_probs"], columns["teacher_log_prob"], config.loss_mode)
    kl = torch.where(columns["response_mask"].bool(), kl, 0.0)
    columns["token_level_rewards"] = columns["token_level_rewards"] - config.distillation_loss_coef * kl


def apply_kl_penalty(data: DataProto, kl_ctrl: Any, kl_penalty: str = "kl") -> tuple[DataProto, dict[str, float]]:
    """`token_level_rewards` = `token_level_scores` - coefficient × KL(policy ‖ reference); moves the controller."""
    mask = data.batch["response_mask"]
    estimate = kl_estimate(data.batch["old_log_probs"], data.batch["ref_log_prob"], kl_penalty)
    kl = torch.where(mask.bool(), estimate, 0.0)
    coefficient = kl_ctrl.value
    data.batch["token_level_rewards"] = data.batch["token_level_scores"] - coefficient * kl
    whole = Trajectories.of(data)
    answers = whole.mask.any(-1)  # fillers are none
    per_sequence = float(masked_mean(masked_mean(whole.join(kl), whole.mask, axis=-1), answers))
    kl_ctrl.update(current_kl=per_sequence, n_steps=int(answers.sum()))
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
    """Add `advantages` and `returns`: [batch, response]; the estimator sees whole trajectories, one per row.

    `num_repeat` is accepted for older callers; groups are told by `uid`.
    """
    if "response_mask" not in data.batch.keys():
        data.batch["response_mask"] = compute_response_mask(data)
    algorithm = as_config(AlgorithmConfig, config)
    tensors, arrays = data.batch, data.non_tensor_batch
    dimensions = None
    if algorithm.gdpo.reward_keys and takes_argument(adv_estimator, "reward_dimensions"):
        names, key = algorithm.gdpo.reward_keys, "algorithm.gdpo.reward_keys"
        dimensions = torch.stack([value_per_answer(data, name, key) for name in names], dim=-1)
    whole = Trajectories.of(data)

    def at_end(name: str) -> torch.Tensor | None:
        return whole.at_end(tensors[name]) if name in tensors.keys() else None

    last_value = at_end("last_value")
    if last_value is not None:  # what follows an answer that ended by itself is nothing
        last_value = torch.where(whole.at_end(cut_answers(data)), last_value, 0.0)
    advantages, returns = estimate_advantages(
        adv_estimator,
        token_level_rewards=whole.join(tensors["token_level_rewards"]),
        response_mask=whole.mask,
        values=whole.join(tensors["values"]) if "values" in tensors.keys() else None,
        last_value=last_value,
        reward_baselines=at_end("reward_baselines"),
        reward_dimensions=dimensions,
        reward_weights=algorithm.gdpo.reward_weights or None,
        index=arrays["uid"][whole.last_rows] if "uid" in arrays else None,
        gamma=gamma,
        lam=lam,
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
        config=algorithm,
    )
    data.batch["advantages"], data.batch["returns"] = whole.split(advantages), whole.split(returns)
    return data


def value_per_answer(data: DataProto, name: str, key: str) -> torch.Tensor:
    """What the reward said about each answer under `name`: [trajectories]. `score` is the score itself, on any token.

    `key` is the configuration key that asks for it. A sample that could not be scored counts 0.
    """
    whole = Trajectories.of(data)
    if name == "score":
        return masked_sum(whole.join(data.batch["token_level_scores"]), whole.mask, axis=-1).double()
    columns = data.non_tensor_batch
    name = reward_column(columns, name)
    if name not in columns or not all(value is None or isinstance(value, _NUMBER) for value in columns[name]):
        known = [other for other in columns if len(columns[other]) and isinstance(columns[other][0], _NUMBER)]
        raise ValueError(
            f"{key}: the reward returned no number under {name!r} (there is: score, {', '.join(sorted(known))}). Name"
            " one of these, or let the reward function return a dict with it."
        )
    values = [0.0 if value is None or math.isnan(value) else float(value) for value in columns[name][whole.last_rows]]
    return torch.tensor(values, dtype=torch.float64)


def reward_column(columns: Container[str], name: str) -> str:
    """Where `name`, which the reward function returned, stands: where the data has a column `name` too, that is not it
    (see `compute_reward`)."""
    renamed = f"reward_{name}"
    return renamed if name in columns and renamed in columns else name


_NUMBER = (numbers.Real, np.bool_)
