"""SupervisedWorker: what ranks of supervised runs (answers, preferences) have in common."""

from __future__ import annotations

from typing import Any

import torch

from verl.config.engine import CheckpointConfig
from verl.config.supervised import SupervisedConfig
from verl.utils.fs import resolve_model_path
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.common.step_checks import REFUSED, SKIPPED
from verl.workers.roles.engines import start_engine
from verl.workers.roles.saving import SavingWorker


def micro_batching(config: SupervisedConfig) -> MicroBatching:
    """How the rows of each rank are cut."""
    data = config.data
    return MicroBatching.by(data.use_dynamic_bsz, data.micro_batch_size_per_gpu, data.max_token_len_per_gpu)


class SupervisedWorker(SavingWorker):
    """A rank with a model that learns from files."""

    config: SupervisedConfig

    def _start(self, mesh: str) -> None:
        """Load the model, with a new head where it wants one, and shard it over the ranks."""
        config, optim = self.config, self.config.optim
        self.init_process_group()
        torch.manual_seed(config.data.seed + self.rank)  # for dropout, where the model is told to have some
        path = resolve_model_path(config.model.path)
        self.engine = start_engine(self, mesh, path, config.model_kind, config.model, config, optim, optim.grad_clip)

    def _step_metrics(self) -> dict[str, Any]:
        """Take the optimizer's step, and say of it what every run logs."""
        step = self.engine.optimizer_step()
        metrics: dict[str, Any] = {
            "train/grad_norm": step["grad_norm"],
            "train/lr": step["lr"],
            "train/skipped_steps": step[SKIPPED] + step[REFUSED],
        }
        if self.device.type == "cuda":
            metrics["perf/memory_allocated_gb_max"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        return metrics

    @property
    def checkpoint(self) -> CheckpointConfig:
        return self.config.checkpoint

    def _micro(self) -> MicroBatching:
        return micro_batching(self.config)
