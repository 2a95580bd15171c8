"""Columns that the updates read and the controller computes: old log-probs, rewards, advantages and returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.config import PPOConfig
from verl.protocol import DataProto
from verl.trainer.ppo.advantage import add_advantages, cut_answers, reward_column
from verl.trainer.ppo.groups import local_columns
from verl.trainer.ppo.metric_utils import compute_data_metrics, reference_metrics
from verl.trainer.ppo.mismatch import RolloutMismatch
from verl.types.schema import columns_read_by
from verl.utils.torch_functional import masked_mean

__all__ = ["add_advantage_columns", "add_old_log_probs", "compare_old_log_probs"]

Metrics = dict[str, float]


def add_old_log_probs(
    batch: DataProto,
    config: PPOConfig,
    mismatch: RolloutMismatch,
    infer: Callable[[DataProto], DataProto],
    ranks: int,
) -> tuple[DataProto, Metrics]:
    """Add `old_log_probs` [batch, response]; return the batch and its metrics.

    `infer` runs a forward pass of the current policy on `ranks` ranks. With `rollout_correction.bypass_mode` it runs on
    a sample of the rows only, to measure the mismatch; the other rows use the log-probs of the rollout.
    """
    bypass, measured = config.algorithm.rollout_correction.bypass_mode, batch
    if bypass:
        mismatch.require_whole_sequences(batch)
        rows = mismatch.sample(batch, ranks)
        measured = batch.select_idxs(rows)
    result = infer(measured)
    entropy = result.pop(["entropys"]).batch["entropys"]
    metrics = {"actor/entropy": float(masked_mean(entropy, measured.batch["response_mask"]))}
    if not bypass:
        return batch.union(result), metrics
    measured, read = measured.union(result), columns_read_by("correction")
    metrics |= mismatch.correct(measured, local_columns(measured, read, read))
    batch.batch["old_log_probs"] = mismatch.old_log_probs(batch, rows, measured.batch["old_log_probs"])
    return batch, metrics


def add_advantage_columns(
    batch: DataProto, config: PPOConfig, mismatch: RolloutMismatch, kl_controller: Any, use_critic: bool
) -> Metrics:
    """Add `token_level_rewards` (with the KL penalty, if configured), `advantages` and `returns`, the weights of the
    rollout correction and the mask of truncated responses; return the metrics of the batch."""
    algorithm, data = config.algorithm, config.data
    compares = not algorithm.rollout_correction.bypass_mode  # with bypass_mode they were compared before
    names = columns_read_by("advantage", "correction") if compares else columns_read_by("advantage")
    rewards = [reward_column(batch.non_tensor_batch, name) for name in algorithm.gdpo.reward_keys]
    local = local_columns(batch, names, (*names, *rewards))
    metrics = add_advantages(local, algorithm, kl_controller, config.distillation)
    for name in ("token_level_rewards", "advantages", "returns"):
        batch.batch[name] = local.batch[name]
    if compares and "old_log_probs" in local.batch.keys():
        metrics |= mismatch.correct(batch, local)
    if algorithm.truncated_responses == "mask":
        batch.batch["response_mask"] = batch.batch["response_mask"] * ~cut_answers(local)[:, None]
    local.meta_info |= {
        "max_response_length": data.max_response_length,
        "max_prompt_length": data.max_prompt_length,
    }
    local = local.union(local_columns(batch, ("attention_mask",), ("num_turns",)))
    return metrics | compute_data_metrics(local, use_critic)


def compare_old_log_probs(batch: DataProto, mismatch: RolloutMismatch) -> Metrics:
    """Return the metrics of `old_log_probs` that the update itself computed, against reference and rollout."""
    names = (*columns_read_by("correction"), "ref_log_prob")
    columns = local_columns(batch, names, names)
    return reference_metrics(columns) | mismatch.correct(batch, columns)
