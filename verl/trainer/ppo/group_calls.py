"""GroupCalls: a batch to a worker group and back; rows evened out over the ranks, results in the batch's order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from verl.config import PPOConfig
from verl.protocol import DataProto
from verl.trainer.ppo.arrange import balanced_order, evenness, rank_major_order, row_costs
from verl.types.schema import Call, columns_read_by, selected_for
from verl.utils.flops import SequenceCost
from verl.utils.fs import resolve_model_path
from verl.utils.metric import reduce_metrics


class GroupCalls:
    """`dp_sizes` are the data-parallel ranks of each role."""

    def __init__(self, config: PPOConfig, dp_sizes: Mapping[str, int]) -> None:
        self._config, self._dp_sizes = config, dp_sizes
        model = config.actor_rollout_ref.model
        self._cost = SequenceCost.of_folder(resolve_model_path(model.path), model.override_config)

    def infer(self, method: Callable[..., Any], batch: DataProto, role: str) -> DataProto:
        """A pass without an update: its columns for every row."""
        order = balanced_order(row_costs(batch, self._cost), self._dp_sizes[role], self._config.trainer.balance_batch)
        sent = select_read_by(batch, "reward_model" if role == "reward_model" else "infer").select_idxs(order)
        sent.meta_info = {"temperature": self._config.actor_rollout_ref.rollout.temperature}
        return _in_order(method(sent), order)

    def update(self, method: Callable[..., Any], batch: DataProto, role: str, step: int) -> dict[str, float]:
        """Mini-batches are runs of whole prompts in the batch's order; every rank gets its part of each.

        Returns metrics; columns that the update gives are added to `batch`.
        """
        block = self._config.critic if role == "critic" else self._config.actor_rollout_ref.actor
        minis = max(1, len(batch) // (block.ppo_mini_batch_size * self._config.actor_rollout_ref.rollout.n))
        costs, ranks = row_costs(batch, self._cost), self._dp_sizes[role]
        order = rank_major_order(costs, ranks, minis, self._config.trainer.balance_batch)
        # Objects stay here: ground truths may be large. Tensors of the user's own go along.
        read = selected_for("update_critic" if role == "critic" else "update_actor", batch.batch.keys())
        arranged = batch.select(read, []).select_idxs(order)
        arranged.meta_info = {
            "temperature": self._config.actor_rollout_ref.rollout.temperature,
            "mini_batches": minis,
            "global_steps": step,
        }
        result = method(arranged)
        metrics = reduce_metrics(result.meta_info["metrics"])
        if role == "actor" and ranks > 1:
            metrics |= evenness(costs, order, ranks, minis)
        if len(result):
            batch.union(_in_order(result, order))
        return metrics


def select_read_by(batch: DataProto, call: Call) -> DataProto:
    """The columns that a call reads, without metadata."""
    names = columns_read_by(call)
    tensors, objects = batch.batch.keys(), batch.non_tensor_batch
    return batch.select([n for n in names if n in tensors], [n for n in names if n in objects], [])


def local_columns(batch: DataProto, names: Iterable[str], objects: Iterable[str] | None = None) -> DataProto:
    """Those of the named columns that there are (all objects, if none are named), on the controller."""
    arrays = batch.non_tensor_batch
    tensors = {name: batch.batch[name] for name in names if name in batch.batch.keys()}
    kept = {name: arrays[name] for name in (arrays if objects is None else objects) if name in arrays}
    return DataProto.from_dict(tensors, kept, batch.meta_info)


def _in_order(result: DataProto, order: np.ndarray) -> DataProto:
    result.reorder(np.argsort(order))
    result.meta_info = {}
    return result
