"""Workers of supervised runs: SFTWorker (fine-tuning) and RewardTrainingWorker (preferences)."""

from __future__ import annotations

from typing import Any

import torch

from verl.algos.preference import Pairs, preference_loss
from verl.config import ModelConfig, RMConfig, RolloutConfig, SFTConfig, as_config, load_config
from verl.config.engine import CheckpointConfig
from verl.config.supervised import SupervisedConfig
from verl.protocol import DataProto, object_array
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.exceptions import fields_as_keys
from verl.utils.fs import resolve_model_path
from verl.utils.progress import expect
from verl.workers.engine.base import Counts, MicroBatching
from verl.workers.engine.common.optim import NON_FINITE, RECOMPILES, REFUSED
from verl.workers.roles.training import CheckpointedWorker, explain_out_of_memory, infer_columns, start_engine
from verl.workers.rollout.engine_host import EngineHost
from verl.workers.rollout.placement import open_rollout
from verl.workers.sharding_manager import InProcessTransfer


def micro_batching(config: SupervisedConfig) -> MicroBatching:
    """Return the micro-batch limit of a supervised run."""
    data = config.data
    return MicroBatching.from_config(data.use_dynamic_bsz, data.micro_batch_size_per_gpu, data.max_token_len_per_gpu)


class SupervisedWorker(CheckpointedWorker):
    """A rank of supervised training (fine-tuning, preferences)."""

    config: SupervisedConfig

    def _start(self, mesh: str) -> None:
        """Load the model, with a new head if it needs one, and shard it over the ranks."""
        config, optim = self.config, self.config.optim
        self.init_process_group()
        torch.manual_seed(config.data.seed + self.rank)  # for dropout, if the model has it enabled
        path = resolve_model_path(config.model.path)
        self.engine = start_engine(self, mesh, path, config.model_kind, config.model, config, optim, optim.grad_clip)

    def _step_metrics(self) -> dict[str, Any]:
        """Take the optimizer step, and return the metrics that every run logs."""
        step = self.engine.optimizer_step()
        metrics: dict[str, Any] = {
            "train/grad_norm": step["grad_norm"],
            "train/lr": step["lr"],
            "train/skipped_steps": step[NON_FINITE] + step[REFUSED],
        }
        if RECOMPILES in step:
            metrics["perf/recompiles"] = step[RECOMPILES]
        if self.device.type == "cuda":
            metrics["perf/memory_allocated_gb_max"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        return metrics

    @property
    def checkpoint(self) -> CheckpointConfig:
        return self.config.checkpoint


INDEX_COLUMN = "row"
"""Column [rows]: index of the row in the batch; in reward-model training, index among all responses of the step."""
RECORDS_ROWS = "records_rows"
"""Key of `meta_info`: whether the results that the recording needs are returned."""

SumAndCount = tuple[torch.Tensor, torch.Tensor]
# Model settings that are passed to the rollout engine.
_MODEL_KEYS = ("path", "trust_remote_code", "override_config")


def token_mean_loss(
    output: dict[str, torch.Tensor], data: DataProto, counts: Counts
) -> tuple[torch.Tensor, dict[str, SumAndCount]]:
    """A `LossFn`: the negative log-likelihood, averaged over the step's tokens with `response_mask` 1, weighted by
    `loss_weights` if given, on all ranks."""
    total, tokens = negative_log_likelihood(output["log_probs"], data)
    return total / (counts.tokens or 1.0), {"loss": (total, tokens)}


def negative_log_likelihood(log_probs: torch.Tensor, data: DataProto) -> SumAndCount:
    """Return (sum over tokens with `response_mask` 1, their number), both weighted by `loss_weights` if given."""
    weights = loss_weights(data)
    return -(log_probs * weights).sum(), weights.sum()


def loss_weights(data: DataProto) -> torch.Tensor:
    """Return the weights of the response tokens in the loss [rows, response]."""
    mask = data.batch["response_mask"]
    return mask * data.batch["loss_weights"] if "loss_weights" in data.batch.keys() else mask


class LogProbRecorder:
    """A `LossFn`: `token_mean_loss`, which also keeps the log-probs of every row for the recording of the run."""

    def __init__(self) -> None:
        self._rows: list[torch.Tensor] = []
        self._log_probs: list[torch.Tensor] = []

    def __call__(
        self, output: dict[str, torch.Tensor], data: DataProto, counts: Counts
    ) -> tuple[torch.Tensor, dict[str, SumAndCount]]:
        self._rows.append(data.batch[INDEX_COLUMN])
        self._log_probs.append(output["log_probs"].detach())
        return token_mean_loss(output, data, counts)

    def log_probs(self) -> torch.Tensor:
        """Return the log-probs [rows, response] in the order of `INDEX_COLUMN`, on the CPU."""
        return torch.cat(self._log_probs)[torch.cat(self._rows).argsort()].cpu()


class SFTWorker(SupervisedWorker):
    """One rank of supervised fine-tuning. Batches have a rollout's columns; `response_mask` marks trained tokens."""

    def __init__(self, config: Any) -> None:
        self.config = load_config(config, check_files=False, root=SFTConfig)
        self._rollout: Any = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model and shard it over the ranks."""
        self._start("sft")

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("sft"))
    @explain_out_of_memory("sft")
    def train_batch(self, data: DataProto) -> DataProto:
        """Take one optimizer step on the rows of all ranks; metrics in `meta_info["metrics"]`.

        With `meta_info[RECORDS_ROWS]` also return `log_probs` [rows, response] of the loss.
        """
        expect(len(data))
        recorder = LogProbRecorder() if data.meta_info.get(RECORDS_ROWS) and self.engine.collects else None
        if recorder is not None:
            data = data.select()
            data.batch[INDEX_COLUMN] = torch.arange(len(data))
        loss, micro = recorder or token_mean_loss, micro_batching(self.config)
        losses = self.engine.forward_backward(data, loss, ["log_probs"], micro=micro)
        columns = {} if recorder is None else {"log_probs": recorder.log_probs()}
        metrics = {f"train/{name}": value for name, value in losses.items()} | self._step_metrics()
        return DataProto.from_dict(columns, meta_info={"metrics": metrics})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("sft"))
    @explain_out_of_memory("sft")
    def evaluate(self, data: DataProto) -> DataProto:
        """Return the loss of `train_batch` without training, as metric `val/loss`; filler rows have mask 0.

        With `meta_info[RECORDS_ROWS]` also return its sum over the tokens of each row, and their number (weighted as in
        the loss): `row_loss`, `row_tokens` [rows].
        """
        result = infer_columns(self.engine, data, {"log_probs": "log_probs"}, 1.0, micro_batching(self.config))
        if not self.engine.collects:
            return result
        total, tokens = negative_log_likelihood(result.batch["log_probs"], data)
        metrics = {"val/loss": (float(total), float(tokens))}
        columns: dict[str, torch.Tensor] = {}
        if data.meta_info.get(RECORDS_ROWS):
            weights = loss_weights(data)
            columns = {"row_loss": -(result.batch["log_probs"] * weights).sum(1), "row_tokens": weights.sum(1)}
        return DataProto.from_dict(columns, meta_info={"metrics": metrics})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @explain_out_of_memory("sft_answers")
    def resume_rollout(self, version: int) -> None:
        """Start or resume the rollout engine and sync the current weights, before calls of `generate`."""
        if self._rollout is None:
            config = self.config
            # RolloutConfig does not allow temperature 0; requests override it.
            settings = {**config.rollout.to_dict(), "temperature": config.rollout.temperature or 1.0}
            settings |= {"free_cache_engine": True, "free_weights": True}
            model = as_config(
                ModelConfig, {name: config.model[name] for name in _MODEL_KEYS}, at="actor_rollout_ref.model"
            )
            with fields_as_keys("rollout", RolloutConfig):
                path = resolve_model_path(config.model.path)
                self._rollout = open_rollout(path, model, as_config(RolloutConfig, settings), self.device)
            self._transfer = InProcessTransfer(self.engine, self._rollout)
        self._rollout.resume()
        self._transfer.sync(version)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("sft"))
    @explain_out_of_memory("sft_answers")
    def generate(self, data: DataProto) -> DataProto:
        """Generate one response per row and return its token ids in the column `response_ids`. Call it between
        `resume_rollout` and `release_rollout`."""
        if not self.engine.collects:
            return DataProto()
        host = EngineHost(self._rollout)
        generated = host.generate_batch(data, {"temperature": self.config.rollout.temperature}).batch
        pairs = zip(generated["responses"], generated["response_mask"].bool(), strict=True)
        return DataProto.from_dict({}, {"response_ids": object_array([ids[mask].tolist() for ids, mask in pairs])})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def release_rollout(self) -> None:
        """Release the memory of the rollout engine for training."""
        if self._rollout is not None:
            self._rollout.release()


TOKENS = ("input_ids", "attention_mask")
PAIRS_COLUMN = "pairs"
"""Column [rows, max pairs, 4]: `INDEX_COLUMN` of the rejected response (-1: no pair), preference, margin, weight."""
GRADIENT_COLUMN = "score_gradients"
"""Column [rows]: gradient of the step's loss with respect to each score, from pairs that are not in `PAIRS_COLUMN`."""


class PreferenceLoss:
    """A `LossFn`: the preference loss of pairs inside the micro-batch, plus scores times their gradients.

    The sum over micro-batches has the gradient of the step's loss. Scores are recorded.
    """

    def __init__(self, centering: float) -> None:
        self._centering = centering
        self._rows: list[torch.Tensor] = []
        self._scores: list[torch.Tensor] = []

    def __call__(
        self, output: dict[str, torch.Tensor], data: DataProto, counts: Counts
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        scores = output["scores"].double()
        self._rows.append(data.batch[INDEX_COLUMN])
        self._scores.append(scores.detach())
        pairs = pairs_in_micro_batch(data.batch[PAIRS_COLUMN], data.batch[INDEX_COLUMN])
        loss = preference_loss(scores, pairs, self._centering, counts.tokens)
        return (loss + (scores * data.batch[GRADIENT_COLUMN]).sum()).float(), {}

    def scores_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the recorded scores of the responses with these values of `INDEX_COLUMN`."""
        index = {int(row): at for at, row in enumerate(torch.cat(self._rows).tolist())}
        return torch.cat(self._scores).float().cpu()[[index[row] for row in rows.tolist()]]


def pairs_in_micro_batch(compared: torch.Tensor, rows: torch.Tensor) -> Pairs:
    """Return the pairs of a micro-batch, which contains both responses of each pair; absent pairs have weight 0.

    The number of pairs is not read from the device, which would require a synchronisation.
    """
    rejected = (compared[..., :1] == rows).int().argmax(dim=2)
    chosen = torch.arange(len(rows), device=rows.device)[:, None].expand_as(rejected)
    _, preference, margin, weight = compared.unbind(dim=2)
    weight = weight * (compared[..., 0] >= 0)
    return Pairs(*(column.reshape(-1) for column in (chosen, rejected, preference, margin, weight)))


class RewardTrainingWorker(SupervisedWorker):
    """One rank of reward-model training. A row is a prompt with a response."""

    config: RMConfig

    def __init__(self, config: Any) -> None:
        self.config = load_config(config, check_files=False, root=RMConfig)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model, with a new head if it has none, and shard it over the ranks."""
        self._start("rm")

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("rm"))
    @explain_out_of_memory("rm")
    def evaluate(self, data: DataProto) -> DataProto:
        """Return `scores` [rows] and the columns of the batch other than tokens."""
        result = infer_columns(self.engine, data, {"scores": "scores"}, 1.0, micro_batching(self.config))
        others = [name for name in data.batch.keys() if name not in TOKENS]
        return result.union(data.select(batch_keys=others)) if self.engine.collects else result

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("rm"))
    @explain_out_of_memory("rm")
    def train_batch(self, data: DataProto) -> DataProto:
        """Take one optimizer step on the rows of all ranks; return `scores` [rows] before it, and metrics.

        `meta_info["weight"]` is the total weight of all pairs of the step.
        """
        expect(len(data))
        loss, weight = PreferenceLoss(self.config.centering_coef), data.meta_info["weight"]
        counts = Counts(tokens=weight, sequences=weight)
        passes = self.engine.forward_backward(data, loss, ["scores"], micro=micro_batching(self.config), counts=counts)
        metrics = {f"train/{name}": value for name, value in passes.items()}
        meta_info = {"metrics": metrics | self._step_metrics()}
        if not self.engine.collects:
            return DataProto(meta_info=meta_info)
        return DataProto.from_dict({"scores": loss.scores_of(data.batch[INDEX_COLUMN])}, meta_info=meta_info)
