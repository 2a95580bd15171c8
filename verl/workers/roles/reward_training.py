"""RewardTrainingWorker: a sequence classifier that learns to score answers."""

from __future__ import annotations

from typing import Any

import torch

from verl.config import RMConfig, load_config
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.progress import expect
from verl.workers.engine.base import Counts
from verl.workers.roles.engines import inferred
from verl.workers.roles.memory import phase_memory
from verl.workers.roles.supervised import SupervisedWorker

TOKENS = ("input_ids", "attention_mask")
SLOPES = "slopes"
"""[answers]: how much the loss of the whole step changes with each score."""


def sloped_scores(
    output: dict[str, torch.Tensor], data: DataProto, counts: Counts
) -> tuple[torch.Tensor, dict[str, Any]]:
    """A `LossFn` whose gradient is that of the step's loss, and adds up over answers."""
    return (output["scores"] * data.batch[SLOPES]).sum(), {}


class RewardTrainingWorker(SupervisedWorker):
    """One rank of reward-model training. A row is a prompt with an answer."""

    def __init__(self, config: Any) -> None:
        self.config = load_config(config, check_files=False, root=RMConfig)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model, with a new head where it has none, and shard it over the ranks."""
        self._start("rm")

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
        return DataProto(meta_info={"metrics": self._step_metrics()})
