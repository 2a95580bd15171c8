"""CriticWorker: a value head on a causal LM, trained with the clipped value loss."""

from __future__ import annotations

from typing import Any

import torch

from verl.algos import compute_value_loss, global_share, rows_of_trajectories
from verl.config import CriticConfig, as_config
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.fs import resolve_model_path
from verl.utils.torch_functional import masked_mean
from verl.workers.engine.base import Counts
from verl.workers.engine.common.micro_batches import trajectory_tokens
from verl.workers.roles.engines import make_engine
from verl.workers.roles.memory import phase_memory
from verl.workers.roles.updates import micro_batching, run_epochs


class ValueLoss:
    """A `LossFn` for the engine."""

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
        part = (loss.detach(), None)  # of the whole step's: `run_epochs` gives it its count
        metrics = {
            "loss": part,
            "value_loss": part,
            "vf_clipfrac": (clipfrac * tokens, tokens),
            "vpred_mean": (masked_mean(output["values"].detach(), mask) * tokens, tokens),
        }
        return loss, metrics


class CriticWorker(Worker):
    """One rank of the critic."""

    def __init__(self, config: Any) -> None:
        self.config = as_config(CriticConfig, config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model and shard it over the ranks."""
        config = self.config
        self.init_process_group()
        self.engine = make_engine(
            config.strategy,
            resolve_model_path(config.model.path, "critic.model.path"),
            "value",
            config.model,
            config,
            self.device,
            optim=config.optim,
            grad_clip=config.grad_clip,
            total_steps=config.optim.total_training_steps,
        )
        self.register_mesh_place("critic", self.engine.dp_rank, collect=self.engine.answers)
        self._rest()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("critic"))
    @phase_memory("values", at="critic")
    def compute_values(self, data: DataProto) -> DataProto:
        """`values`: [batch, response]."""
        self.engine.to("device", model=True, optimizer=False)
        micro = micro_batching(self.config, "forward_micro_batch_size_per_gpu", "forward_max_token_len_per_gpu")
        result = self.engine.infer(data, ["values"], 1.0, micro)
        self._rest()
        return result

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("critic"))
    @phase_memory("update_critic", at="critic")
    def update_critic(self, data: DataProto) -> DataProto:
        """`ppo_epochs` passes over the rows; metrics in `meta_info["metrics"]`."""
        self.engine.to("device")
        result = run_epochs(
            self.engine,
            data,
            ValueLoss(self.config),
            ["values"],
            temperature=1.0,
            micro=micro_batching(self.config, "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu"),
            mini_batches=data.meta_info["mini_batches"],
            epochs=self.config.ppo_epochs,
            prefix="critic",
        )
        self._rest()
        return result

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_checkpoint(self, path: str) -> None:
        """Sharded state under `path`; a token classifier with one label under `path/huggingface`."""
        contents = self.config.checkpoint.save_contents
        self.engine.to("device")
        try:
            self.engine.save(path, [part for part in contents if part != "hf_model"])
            if "hf_model" in contents:
                self.engine.export_hf(f"{path}/huggingface")
        finally:
            self._rest()  # training goes on after a failed save

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Read back what `save_checkpoint` wrote."""
        self.engine.to("device")
        self.engine.load(path, [part for part in self.config.checkpoint.load_contents if part != "hf_model"])
        self._rest()

    def _rest(self) -> None:
        """Between phases, what the configuration says moves to host memory."""
        fsdp = self.config.fsdp_config
        if fsdp.param_offload or fsdp.optimizer_offload:
            self.engine.to("cpu", model=fsdp.param_offload, optimizer=fsdp.optimizer_offload)
