"""SFTWorker: a causal LM that learns to predict the marked tokens of its rows."""

from __future__ import annotations

from typing import Any

import torch

from verl.config import ModelConfig, RolloutConfig, SFTConfig, as_config, load_config
from verl.protocol import DataProto, object_array
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.field_errors import keys_under
from verl.utils.fs import resolve_model_path
from verl.utils.progress import expect
from verl.workers.engine.base import Counts
from verl.workers.roles.engines import inferred
from verl.workers.roles.memory import phase_memory
from verl.workers.roles.supervised import SupervisedWorker
from verl.workers.rollout.engine_host import EngineHost
from verl.workers.rollout.placement import open_rollout
from verl.workers.sharding_manager.in_process import InProcessTransfer

Pair = tuple[torch.Tensor, torch.Tensor]
# What of a model an engine that generates is told.
_MODEL = ("path", "trust_remote_code", "override_config")


def token_mean_loss(
    output: dict[str, torch.Tensor], data: DataProto, counts: Counts
) -> tuple[torch.Tensor, dict[str, Pair]]:
    """A `LossFn`: the mean over all marked tokens of the step, whichever rank and micro-batch they are in."""
    total, tokens = negative_log_likelihood(output["log_probs"], data)
    return total / (counts.tokens or 1.0), {"loss": (total, tokens)}


def negative_log_likelihood(log_probs: torch.Tensor, data: DataProto) -> Pair:
    """(its sum over the marked tokens, their number), both by `loss_weights` where the rows of `data` have them."""
    weights = data.batch["response_mask"]
    if "loss_weights" in data.batch.keys():
        weights = weights * data.batch["loss_weights"]
    return -(log_probs * weights).sum(), weights.sum()


class SFTWorker(SupervisedWorker):
    """One rank of supervised fine-tuning. Batches have a rollout's columns; `response_mask` marks what to learn."""

    def __init__(self, config: Any) -> None:
        self.config = load_config(config, check_files=False, root=SFTConfig)
        self._rollout: Any = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model and shard it over the ranks."""
        self._start("sft")

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("sft"))
    @phase_memory("sft")
    def train_batch(self, data: DataProto) -> DataProto:
        """One optimizer step on the rows of all ranks; metrics in `meta_info["metrics"]`."""
        expect(len(data))
        found = self.engine.forward_backward(data, token_mean_loss, ["log_probs"], micro=self._micro())
        metrics = {f"train/{name}": value for name, value in found.items()} | self._step_metrics()
        return DataProto(meta_info={"metrics": metrics})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("sft"))
    def evaluate(self, data: DataProto) -> DataProto:
        """The same loss without learning; rows that only fill up a rank's share are masked."""
        found = inferred(self.engine, data, {"log_probs": "log_probs"}, 1.0, self._micro())
        if not self.engine.collects:
            return found
        total, tokens = negative_log_likelihood(found.batch["log_probs"], data)
        return DataProto(meta_info={"metrics": {"val/loss": (float(total), float(tokens))}})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @phase_memory("sft_answers")
    def begin_answers(self, version: int) -> None:
        """Open the engine that answers, or wake it, and hand it the weights as they are now."""
        if self._rollout is None:
            config = self.config
            # A rollout of PPO never samples at temperature 0; requests say it themselves.
            settings = {**config.rollout.to_dict(), "temperature": config.rollout.temperature or 1.0}
            settings |= {"free_cache_engine": True, "free_weights": True}
            model = as_config(ModelConfig, {name: config.model[name] for name in _MODEL}, at="actor_rollout_ref.model")
            with keys_under("rollout", RolloutConfig):
                path = resolve_model_path(config.model.path)
                self._rollout = open_rollout(path, model, as_config(RolloutConfig, settings), self.device)
            self._transfer = InProcessTransfer(self.engine, self._rollout)
        self._rollout.resume()
        self._transfer.sync(version)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("sft"))
    @phase_memory("sft_answers")
    def answer(self, data: DataProto) -> DataProto:
        """Generate one response per row and return its token ids in the column `answer`. Call it between
        `begin_answers` and `end_answers`."""
        if not self.engine.collects:
            return DataProto()
        host = EngineHost(self._rollout)
        generated = host.generate_batch(data, {"temperature": self.config.rollout.temperature}).batch
        pairs = zip(generated["responses"], generated["response_mask"].bool(), strict=True)
        return DataProto.from_dict({}, {"answer": object_array([ids[mask].tolist() for ids, mask in pairs])})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def end_answers(self) -> None:
        """The engine's memory is training's again."""
        if self._rollout is not None:
            self._rollout.release()
