"""LearningColumns: what updates read of a batch beside the models' own passes: old log-probs, rewards, advantages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.config import PPOConfig
from verl.protocol import DataProto
from verl.trainer.ppo.advantage import add_advantages, check_bootstrap, cut_answers, reward_column
from verl.trainer.ppo.groups import local_columns
from verl.trainer.ppo.metric_utils import compute_data_metrics, reference_metrics
from verl.trainer.ppo.mismatch import RolloutMismatch
from verl.types.schema import columns_read_by
from verl.utils.torch_functional import masked_mean

__all__ = ["LearningColumns"]

Metrics = dict[str, float]


class LearningColumns:
    """Adds them to a batch, computed on the controller from the columns they name, and says what they are like."""

    def __init__(self, config: PPOConfig, use_critic: bool) -> None:
        check_bootstrap(config.algorithm)
        self._config, self._use_critic = config, use_critic
        self._correction = config.algorithm.rollout_correction
        self._mismatch = RolloutMismatch(self._correction)

    def add_old_log_probs(
        self, batch: DataProto, infer: Callable[[DataProto], DataProto], ranks: int
    ) -> tuple[DataProto, Metrics]:
        """`old_log_probs`, by `infer`, a pass of the policy about to be updated, on `ranks` ranks; with bypass_mode of
        a few answers, to compare."""
        bypass, measured = self._correction.bypass_mode, batch
        if bypass:
            self._mismatch.require_whole_sequences(batch)
            rows = self._mismatch.sample(batch, ranks)
            measured = batch.select_idxs(rows)
        result = infer(measured)
        entropy = result.pop(["entropys"]).batch["entropys"]
        metrics = {"actor/entropy": float(masked_mean(entropy, measured.batch["response_mask"]))}
        if not bypass:
            return batch.union(result), metrics
        measured, read = measured.union(result), columns_read_by("correction")
        metrics |= self._mismatch.correct(measured, local_columns(measured, read, read))
        batch.batch["old_log_probs"] = self._mismatch.old_log_probs(batch, rows, measured.batch["old_log_probs"])
        return batch, metrics

    def add_advantages(self, batch: DataProto, kl_controller: Any) -> Metrics:
        """KL in the reward if asked for, then `advantages` and `returns`, and the mask of what is learned."""
        algorithm, data = self._config.algorithm, self._config.data
        compares = not self._correction.bypass_mode  # else the rollout's are the old ones
        wanted = columns_read_by("advantage", "correction") if compares else columns_read_by("advantage")
        rewards = [reward_column(batch.non_tensor_batch, name) for name in algorithm.gdpo.reward_keys]
        local = local_columns(batch, wanted, (*wanted, *rewards))
        metrics = add_advantages(local, algorithm, kl_controller, self._config.distillation)
        for name in ("token_level_rewards", "advantages", "returns"):
            batch.batch[name] = local.batch[name]
        if compares and "old_log_probs" in local.batch.keys():
            metrics |= self._mismatch.correct(batch, local)
        if algorithm.truncated_responses == "mask":
            batch.batch["response_mask"] = batch.batch["response_mask"] * ~cut_answers(local)[:, None]
        local.meta_info |= {
            "max_response_length": data.max_response_length,
            "max_prompt_length": data.max_prompt_length,
        }
        local = local.union(local_columns(batch, ("attention_mask",), ("num_turns",)))
        return metrics | compute_data_metrics(local, self._use_critic)

    def compare_after_update(self, batch: DataProto) -> Metrics:
        """Where the update gave the old log-probs: how they are to the reference's and to the rollout's."""
        read = (*columns_read_by("correction"), "ref_log_prob")
        columns = local_columns(batch, read, read)
        return reference_metrics(columns) | self._mismatch.correct(batch, columns)
