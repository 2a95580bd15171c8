"""RewardTrainingWorker: a sequence classifier that learns to score answers."""

from __future__ import annotations

from typing import Any

import torch

from verl.config import RMConfig, load_config
from verl.config.engine import CheckpointConfig
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.fs import resolve_model_path
from verl.utils.progress import expect
from verl.workers.engine.base import Counts, MicroBatching
from verl.workers.engine.common.step_checks import REFUSED, SKIPPED
from verl.workers.roles.engines import inferred, start_engine
from verl.workers.roles.memory import phase_memory
from verl.workers.roles.saving import SavingWorker

TOKENS = ("input_ids", "attention_mask")
SLOPES = "slopes"
"""[answers]: how much the loss of the whole step changes with each score."""


def sloped_scores(
    output: dict[str, torch.Tensor], data: DataProto, counts: Counts
) -> tuple[torch.Tensor, dict[str, Any]]:
    """A `LossFn` whose gradient is that of the step's loss, and adds up over answers."""
    return (output["scores"] * data.batch[SLOPES]).sum(), {}


class RewardTrainingWorker(SavingWorker):
    """One rank of reward-model training. A row is a prompt with an answer."""

    def __init__(self, config: Any) -> None:
        self.config = load_config(config, check_files=False, root=RMConfig)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model, with a new head where it has none, and shard it over the ranks."""
        config, optim = self.config, self.config.optim
        self.init_process_group()
        torch.manual_seed(config.data.seed + self.rank)  # for dropout, where the model is told to have some
        path = resolve_model_path(config.model.path)
        self.engine = start_engine(self, "rm", path, config.model_kind, config.model, config, optim, optim.grad_clip)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("rm"))
    @phase_memory("sft")
    def evaluate(self, data: DataProto) -> DataProto:
        """`scores` [answers], and the columns of the batch that are no tokens."""
        found = inferred(self.engine, data, {"scores": "scores"}, 1.0, self._micro())
        others = [name for name in data.batch.keys() if name not in TOKENS]
        return found.union(data.select(batch_keys=others)) if self.engine.collects else found

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("rm"))
    @phase_memory("sft")
    def train_batch(self, data: DataProto) -> DataProto:
        """One optimizer step on the answers of all ranks by their slopes; metrics in `meta_info["metrics"]`."""
        expect(len(data))
        counts = Counts(tokens=data.meta_info["pairs"], sequences=data.meta_info["pairs"])
        self.engine.forward_backward(data, sloped_scores, ["scores"], micro=self._micro(), counts=counts)
        step = self.engine.optimizer_step()
        metrics: dict[str, Any] = {
            "train/grad_norm": step["grad_norm"],
            "train/lr": step["lr"],
            "train/skipped_steps": step[SKIPPED] + step[REFUSED],
        }
        if self.device.type == "cuda":
            metrics["perf/memory_allocated_gb_max"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        return DataProto(meta_info={"metrics": metrics})

    @property
    def checkpoint(self) -> CheckpointConfig:
        return self.config.checkpoint

    def _micro(self) -> MicroBatching:
        data = self.config.data
        return MicroBatching.by(data.use_dynamic_bsz, data.micro_batch_size_per_gpu, data.max_token_len_per_gpu)
