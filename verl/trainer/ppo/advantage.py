"""Old log-probs, token-level rewards (with KL penalties), advantages and returns, computed on the controller.

RolloutMismatch: measures and corrects the mismatch of the trainer's log-probs with those of the rollout.
"""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl.algos import correct_rollout, estimate_advantages, takes_argument
from verl.algos import kl_penalty as kl_estimate
from verl.algos.groups import Trajectories
from verl.config import AlgorithmConfig, PPOConfig, RolloutCorrectionConfig, as_config
from verl.config.ppo import DistillationConfig, DistillationLossConfig
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import compute_data_metrics, reference_metrics, truncated_rows
from verl.trainer.ppo.row_balancing import local_columns
from verl.types.schema import columns_read_by
from verl.utils.torch_functional import masked_mean, masked_sum

logger = logging.getLogger(__name__)

_NUMBER = (numbers.Real, np.bool_)
# With bypass_mode, the trainer computes the log-probs of every n-th trajectory to measure the mismatch.
_SAMPLE_EVERY = 16
# Keys that need the rollout's log-probs.
_CORRECTION_KEYS = ("rollout_is", "rollout_rs", "bypass_mode")
# Factor on the limit for a warning if the mismatch is corrected.
_CORRECTED_LIMIT_FACTOR = 10
# Further names of the same metrics.
_METRIC_ALIASES = {
    "rollout/log_prob_diff_mean": "rollout_corr/log_prob_diff",
    "rollout/log_prob_diff_p99": "rollout_corr/log_prob_diff_p99",
    "rollout/log_prob_diff_max": "rollout_corr/log_prob_diff_max",
    "rollout/mismatch_kl": "rollout_corr/k3_kl",
}


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


class RolloutMismatch:
    """Applies `algorithm.rollout_correction` to batches.

    The rollout reports log-probs of the full distribution (`rollout_log_probs`) and, if sampling truncates it (top-k,
    top-p), of the distribution it drew from (`rollout_drawn_log_probs`).
    """

    def __init__(self, config: RolloutCorrectionConfig) -> None:
        self._config = config
        self._warned: set[str] = set()

    def add_old_log_probs(
        self, batch: DataProto, infer: Callable[[DataProto], DataProto], ranks: int
    ) -> tuple[DataProto, dict[str, float]]:
        """Add `old_log_probs` [batch, response]; return the batch and its metrics.

        `infer` runs a forward pass of the current policy on `ranks` ranks. With `bypass_mode` it runs on a sample of
        the rows only, to measure the mismatch; the other rows use the log-probs of the rollout.
        """
        bypass, measured = self._config.bypass_mode, batch
        if bypass:
            self.require_one_row_each(batch)
            rows = self.sample(batch, ranks)
            measured = batch.select_idxs(rows)
        result = infer(measured)
        entropy = result.pop(["entropys"]).batch["entropys"]
        metrics = {"actor/entropy": float(masked_mean(entropy, measured.batch["response_mask"]))}
        if not bypass:
            return batch.union(result), metrics
        measured, names = measured.union(result), columns_read_by("correction")
        metrics |= self.correct(measured, local_columns(measured, names, names))
        batch.batch["old_log_probs"] = self.bypass_log_probs(batch, rows, measured.batch["old_log_probs"])
        return batch, metrics

    def compare_old_log_probs(self, batch: DataProto) -> dict[str, float]:
        """Compare the `old_log_probs` that the update has computed with those of reference and rollout; return
        metrics."""
        names = (*columns_read_by("correction"), "ref_log_prob")
        columns = local_columns(batch, names, names)
        return reference_metrics(columns) | self.correct(batch, columns)

    def correct(self, batch: DataProto, columns: DataProto) -> dict[str, float]:
        """Add importance weights and mask to `batch`; return metrics. `columns`: the same rows, on the controller.

        A sequence is a whole trajectory. No effect if the rollout reported no log-probs and no key needs them.
        """
        trajectories, (full, drawn, only_drawn) = Trajectories.of(columns), self._rollout_log_probs(columns)
        if full is None:
            return {}
        correction = correct_rollout(
            trajectories.join(columns.batch["old_log_probs"]),
            trajectories.join(full),
            trajectories.mask,
            self._config,
            None if drawn is None else trajectories.join(drawn),
        )
        if correction.weights is not None:
            batch.batch["rollout_is_weights"] = trajectories.split(correction.weights)
        if self._config.rollout_rs is not None:
            batch.batch["response_mask"] = trajectories.split(correction.response_mask)
        if not only_drawn:  # otherwise the difference includes the truncation of the distribution
            self._warn_if_large(correction.metrics)
        return correction.metrics | {alias: correction.metrics[name] for alias, name in _METRIC_ALIASES.items()}

    def add_denominator(self, batch: DataProto, columns: DataProto) -> None:
        """Add `denominator_log_probs`, the rollout's log-probs in the importance ratio, for an update that computes the
        weights itself. No effect without `rollout_is`, or if the rollout reported no log-probs.

        `columns`: the same rows, on the controller.
        """
        full, drawn, _ = self._rollout_log_probs(columns)
        if self._config.rollout_is is None or full is None:
            return
        denominator = drawn if drawn is not None and self._config.denominator == "drawn" else full
        unknown = full.isnan() if drawn is None else full.isnan() | drawn.isnan()
        batch.batch["denominator_log_probs"] = denominator.masked_fill(unknown, torch.nan)

    def _rollout_log_probs(self, columns: DataProto) -> tuple[torch.Tensor | None, torch.Tensor | None, bool]:
        """Return the rollout's log-probs under the full and under the truncated distribution, where reported, and
        whether those of the truncated one replace the full ones. Raises ValueError if a configured key needs them."""
        full, drawn = (_reported(columns, name) for name in ("rollout_log_probs", "rollout_drawn_log_probs"))
        keys = [name for name in _CORRECTION_KEYS if self._config[name]]
        # Some engines only report log-probs of the truncated distribution.
        if full is None and drawn is not None and (self._config.denominator == "drawn" or not keys):
            return drawn, None, True
        if full is None:
            self._handle_missing_log_probs(keys)
        return full, drawn, False

    def has_weights_by_row(self, batch: DataProto) -> bool:
        """Return whether the importance weights of a row can be computed from this row alone. False if
        `rollout_is=sequence` and a trajectory has several rows."""
        return self._config.rollout_is != "sequence" or Trajectories.of(batch).one_row_each

    def require_one_row_each(self, batch: DataProto) -> None:
        """Raise ValueError if the update computes sequence weights (`bypass_mode`), but trajectories have several rows:
        the update processes rows separately."""
        if self._config.computes_weights_in_loss and not self.has_weights_by_row(batch):
            raise ValueError(
                "algorithm.rollout_correction.rollout_is = sequence with bypass_mode: a trajectory has several rows,"
                " but its ratio cannot be computed from a single row. Set it to token, or bypass_mode=False."
            )

    def bypass_log_probs(self, batch: DataProto, rows: np.ndarray, computed: torch.Tensor) -> torch.Tensor:
        """Return the old log-probs [batch, response] of `bypass_mode`: log-probs of the rollout, or of the trainer for
        tokens without them. `computed`: the trainer's log-probs of these `rows`, padded to the longest of them."""
        log_probs, width = self._denominator(batch).clone(), computed.shape[1]
        reported = log_probs[rows, :width]
        log_probs[rows, :width] = torch.where(reported.isnan(), computed.to(reported.dtype), reported)
        return log_probs

    def sample(self, batch: DataProto, ranks: int) -> np.ndarray:
        """Return the rows to measure with `bypass_mode`: all rows of every 16th trajectory, at least one trajectory per
        rank, and rows with tokens for which the rollout reported no log-prob."""
        trajectories = Trajectories.of(batch)
        count = min(len(trajectories), max(ranks, len(trajectories) // _SAMPLE_EVERY))
        numbers = np.linspace(0, len(trajectories) - 1, count).round().astype(np.int64)
        chosen = np.isin(trajectories.of_row, numbers)
        if "rollout_log_probs" in batch.batch.keys():
            chosen |= self._denominator(batch).isnan().any(dim=-1).numpy()
        return np.flatnonzero(chosen)

    def _denominator(self, batch: DataProto) -> torch.Tensor:
        """Return the rollout's log-probs that the correction divides by (`rollout_correction.denominator`)."""
        drawn = _reported(batch, "rollout_drawn_log_probs") if self._config.denominator == "drawn" else None
        return batch.batch["rollout_log_probs"] if drawn is None else drawn

    def _handle_missing_log_probs(self, keys: Sequence[str]) -> None:
        """Raise ValueError if the user has set one of these keys, which need the log-probs; else warn once."""
        missing = "the rollout reported no log-prob for any sampled token"
        for name in keys:
            if name == "rollout_is" and self._config.rollout_is_from_auto:
                continue
            raise ValueError(
                f"algorithm.rollout_correction.{name} = {self._config[name]}: {missing}. Let the rollout or agent"
                " return the engine's log-probs, or set the key to null (bypass_mode: False)."
            )
        if "missing" not in self._warned:
            self._warned.add("missing")
            stale = " Stale responses are not corrected, which biases training." if keys else ""
            logger.warning("rollout and training are not compared: %s.%s Reported once.", missing, stale)

    def _warn_if_large(self, metrics: Mapping[str, float]) -> None:
        # Differences by truncated sampling are reported at the start of the run, and not included here.
        measured = "engine_log_prob_diff" if "rollout_corr/engine_log_prob_diff" in metrics else "log_prob_diff"
        difference, limit = metrics[f"rollout_corr/{measured}"], self._config.warn_log_prob_diff
        if corrected := any(self._config[name] for name in _CORRECTION_KEYS):
            limit *= _CORRECTED_LIMIT_FACTOR
        if difference <= limit or "difference" in self._warned:
            return
        self._warned.add("difference")
        remedy = "Set algorithm.rollout_correction.rollout_is=token or rollout_rs=token_k1, or"
        if corrected:
            remedy = "It is corrected, but too large for that: lower trainer.max_staleness, or"
        logger.warning(
            "rollout and training differ by %.3g in the log-prob of a token on average (limit: %g, by"
            " algorithm.rollout_correction.warn_log_prob_diff): the policy that generates is not exactly the one that"
            " is trained. %s use the same precision for both engines. Reported once; the metrics rollout_corr/* show"
            " every step.",
            *(difference, limit, remedy),
        )


def _reported(batch: DataProto, name: str) -> torch.Tensor | None:
    """Return a column of the rollout's log-probs; None if the batch lacks it or it is NaN for all unmasked tokens."""
    column = batch.batch[name] if name in batch.batch.keys() else None
    if column is None or (column.isnan().any() and column[batch.batch["response_mask"].bool()].isnan().all()):
        return None
    return column
