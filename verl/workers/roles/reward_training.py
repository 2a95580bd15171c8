"""RewardTrainingWorker: a sequence classifier that learns to score answers."""

from __future__ import annotations

from typing import Any

import torch

from verl.algos.preference import Pairs, preference_loss
from verl.config import RMConfig, load_config
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.progress import expect
from verl.workers.engine.base import Counts
from verl.workers.roles.engines import inferred
from verl.workers.roles.memory import phase_memory
from verl.workers.roles.supervised import SupervisedWorker

TOKENS = ("input_ids", "attention_mask")
ROW = "row"
"""[answers]: each one's place among all answers of the step."""
COMPARED = "compared"
"""[answers, most pairs of one, 4]: `ROW` of the rejected answer (-1: no pair), preference, margin, weight."""
SLOPES = "slopes"
"""[answers]: how much the loss of the whole step changes with each score, by pairs that are not in `COMPARED`."""


class ComparedScores:
    """A `LossFn`: the pairs of the micro-batch, whose answers are all in it, and answers by their slopes. Its parts add
    up to the loss of the whole step (or what has its gradient); the scores are kept."""

    def __init__(self, centering: float) -> None:
        self._centering = centering
        self._rows: list[torch.Tensor] = []
        self._scores: list[torch.Tensor] = []

    def __call__(
        self, output: dict[str, torch.Tensor], data: DataProto, counts: Counts
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        scores = output["scores"].double()
        self._rows.append(data.batch[ROW])
        self._scores.append(scores.detach())
        pairs = pairs_among(data.batch[COMPARED], data.batch[ROW])
        loss = preference_loss(scores, pairs, self._centering, counts.tokens)
        return (loss + (scores * data.batch[SLOPES]).sum()).float(), {}

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """The scores of these `ROW`s."""
        seen = {int(row): at for at, row in enumerate(torch.cat(self._rows).tolist())}
        return torch.cat(self._scores).float().cpu()[[seen[row] for row in rows.tolist()]]


def pairs_among(compared: torch.Tensor, rows: torch.Tensor) -> Pairs:
    """The pairs of a part of a step that holds both answers of each; what is none has no weight.

    Nothing here asks the device how many there are, which would have the host wait for it.
    """
    rejected = (compared[..., :1] == rows).int().argmax(dim=2)
    chosen = torch.arange(len(rows), device=rows.device)[:, None].expand_as(rejected)
    _, preference, margin, weight = compared.unbind(dim=2)
    weight = weight * (compared[..., 0] >= 0)
    return Pairs(*(column.reshape(-1) for column in (chosen, rejected, preference, margin, weight)))


class RewardTrainingWorker(SupervisedWorker):
    """One rank of reward-model training. A row is a prompt with an answer."""

    config: RMConfig

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
        """One optimizer step on the answers of all ranks: `scores` [answers] before it; metrics in
        `meta_info["metrics"]`. `meta_info["weight"]` is that of all pairs of the step."""
        expect(len(data))
        loss, weight = ComparedScores(self.config.centering_coef), data.meta_info["weight"]
        counts = Counts(tokens=weight, sequences=weight)
        self.engine.forward_backward(data, loss, ["scores"], micro=self._micro(), counts=counts)
        told = {"metrics": self._step_metrics()}
        if not self.engine.collects:
            return DataProto(meta_info=told)
        return DataProto.from_dict({"scores": loss.of(data.batch[ROW])}, meta_info=told)
