"""CriticWorker: a value head on a causal LM, trained with the clipped value loss."""

from __future__ import annotations

from typing import Any

import torch

from verl.algos import compute_value_loss, global_share, rows_of_trajectories
from verl.config import CriticConfig, as_config
from verl.config.engine import CheckpointConfig
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.fs import resolve_model_path
from verl.utils.torch_functional import masked_mean
from verl.workers.engine.base import Counts, MicroBatching
from verl.workers.engine.common.micro_batches import trajectory_tokens
from verl.workers.roles.training import (
    CheckpointedWorker,
    explain_out_of_memory,
    infer_columns,
    mini_batches_of_call,
    run_epochs,
    start_engine,
    update_micro_batching,
)


class ValueLoss:
    """A `LossFn`: the clipped value loss."""

    def __init__(self, config: CriticConfig) -> None:
        self.config = config

    def __call__(
        self, output: dict[str, torch.Tensor], data: DataProto, counts: Counts
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """All tensors [batch, response]."""
        config, mask = self.config, data.batch["response_mask"]
        with rows_of_trajectories(trajectory_tokens(data)):
            loss, clipfrac = compute_value_loss(
                output["values"],
                data.batch["returns"],
                data.batch["values"],
                mask,
                config.cliprange_value,
                config.loss_agg_mode,
                config.loss_scale_factor,
            )
            loss = loss * global_share(mask, config.loss_agg_mode, counts.tokens, counts.sequences)
        tokens = mask.sum()
        term = (loss.detach(), None)  # one term of the step's loss, the sum over micro-batches and ranks
        metrics = {
            "loss": term,
            "value_loss": term,
            "vf_clipfrac": (clipfrac * tokens, tokens),
            "vpred_mean": (masked_mean(output["values"].detach(), mask) * tokens, tokens),
        }
        return loss, metrics


class CriticWorker(CheckpointedWorker):
    """One rank of the critic."""

    def __init__(self, config: Any) -> None:
        self.config = as_config(CriticConfig, config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, model_path: str | None = None) -> None:
        """Load the model at `model_path` (default: `critic.model.path`) and shard it over the ranks."""
        config = self.config
        self.init_process_group()
        path = resolve_model_path(model_path or config.model.path, "critic.model.path")
        self.engine = start_engine(self, "critic", path, "value", config.model, config, config.optim, config.grad_clip)
        self.engine.offload()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("critic"))
    @explain_out_of_memory("values", config_root="critic")
    def compute_values(self, data: DataProto) -> DataProto:
        """Return `values` [batch, response] and, if meta_info requests it, `last_value` [batch] after each row."""
        config = self.config
        micro = MicroBatching.from_config(
            config.use_dynamic_bsz, config.forward_micro_batch_size_per_gpu, config.forward_max_token_len_per_gpu
        )
        fields = ("values", "last_value") if data.meta_info.get("last_value") else ("values",)
        with self.engine.on_device(optimizer=False):
            return infer_columns(self.engine, data, {name: name for name in fields}, 1.0, micro)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("critic"))
    @explain_out_of_memory("update_critic", config_root="critic")
    def update_critic(
        self, data: DataProto, ppo_epochs: int | None = None, ppo_mini_batch_size: int | None = None
    ) -> DataProto:
        """Train `ppo_epochs` epochs; metrics in `meta_info["metrics"]`. Arguments override the configuration."""
        config = self.config
        # Rows per prompt in batches without `uid`; 1 for a worker that was started without a run's configuration.
        n = 1 if self.run_config is None else self.run_config.actor_rollout_ref.rollout.n
        mini_batches = mini_batches_of_call(data, ppo_mini_batch_size, config.ppo_mini_batch_size, n, self.engine)
        with self.engine.on_device():
            return run_epochs(
                self.engine,
                data,
                ValueLoss(config),
                ["values"],
                temperature=1.0,
                micro=update_micro_batching(config),
                mini_batches=mini_batches,
                epochs=config.ppo_epochs if ppo_epochs is None else ppo_epochs,
                prefix="critic",
            )

    @property
    def checkpoint(self) -> CheckpointConfig:
        return self.config.checkpoint
