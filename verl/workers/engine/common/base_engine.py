"""BaseTrainEngine: forward, backward and optimizer steps, shared by all training engines."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from verl.config.engine import OptimConfig
from verl.models.forward import FIELDS_OF_KIND, FIELDS_OF_ROWS
from verl.models.loading import ModelKind, read_config, switch_dropout_off
from verl.protocol import DataProto
from verl.utils.balancing import SequenceCost
from verl.utils.device import copy_to_device
from verl.utils.progress import expect
from verl.workers.engine.base import ALL_ROWS, TOP, Counts, LossFn, Metrics, MicroBatching
from verl.workers.engine.common import groups
from verl.workers.engine.common.engine_checkpoint import BackgroundSaves, StoredEngine
from verl.workers.engine.common.micro_batches import MetricSums, local_counts
from verl.workers.engine.common.offload import EngineMemory
from verl.workers.engine.common.optim import LossScale, reason_against, step_metrics
from verl.workers.engine.common.routers import COLUMN as ROUTED
from verl.workers.engine.common.routers import Routers, Routes

# A column of other tokens for each of a response: [B, R, K].
ALTERNATIVES = "teacher_top_ids"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Passes:
    """Through the model with all rows of a rank, in micro-batches."""

    data: DataProto
    fields: tuple[str, ...]
    temperature: float
    micro: MicroBatching
    use: Callable[[dict[str, torch.Tensor], DataProto, list[int] | None], torch.Tensor]
    """Takes the fields of a micro-batch and the indices of its rows (None: a filler that keeps step with other ranks);
    gives the loss, scaled, for a backward pass."""
    top_k: int = 0
    """How many of the likeliest tokens are told at every place."""
    notes: bool = False
    """Whether routers keep which experts they chose."""


class EngineOptimizer(Protocol):
    """AdamW over this rank's part of what learns, with its schedule. Most methods are collectives."""

    @property
    def lr(self) -> float: ...
    @property
    def elements(self) -> int:
        """Weights that learn, over all ranks."""

    def gather_gradients(self) -> None:
        """Those of all micro-batches are whole from now on. RuntimeError where there are none."""

    def norms(self) -> tuple[float, float]:
        """Of the gradients and of the weights; the same on every rank."""

    def weight_norm(self) -> float: ...
    def scale_gradients(self, factor: float) -> None: ...
    def step(self) -> None:
        """One step of every weight that has a gradient, and of the schedule."""

    def zero_grad(self) -> None: ...
    def state_tensors(self) -> list[torch.Tensor]:
        """What it holds beside weights and gradients."""


class TrainedEngine(StoredEngine):
    """See `verl.workers.engine.base.TrainEngine`; an engine gives its passes, the rest is here."""

    collects: bool
    _optimizer: EngineOptimizer | None
    _compiled: bool
    _routers: Routers | None
    """Of a mixture, where somebody asks what they do."""
    _gives: bool
    """Whether this rank has outputs."""
    _moves_gradients: ClassVar[bool] = False
    """`grad_offload`: gradients of earlier micro-batches wait in host memory."""

    @classmethod
    def of_block(
        cls,
        model: str,
        kind: ModelKind,
        model_config: Any,
        block: Any,
        device: torch.device,
        optim: OptimConfig | None = None,
        grad_clip: float | None = None,
        replays: bool = False,
    ) -> Any:
        """As a role's configuration block says."""
        learns, engine = optim is not None, cast(Any, cls)
        return engine(
            model,
            kind,
            model_config=model_config,
            optim=optim,
            grad_clip=grad_clip,
            total_steps=optim.total_training_steps if optim is not None else None,
            device=device,
            compile_layers=block.use_torch_compile,
            snapshots=learns and block.checkpoint.snapshot is not False,
            saved=block.checkpoint.save_contents if learns else (),
            replays=replays,
            **cls._own_arguments(block),
        )

    @classmethod
    def _own_arguments(cls, block: Any) -> dict[str, Any]:
        """Of the constructor: `engine_config`, and what only this engine has."""
        raise NotImplementedError

    def _begin(
        self,
        model: str | os.PathLike | nn.Module,
        kind: ModelKind,
        model_config: Any,
        precision: str | None,
        device: torch.device | str,
        grad_clip: float | None,
    ) -> None:
        """What is known of a model before it is built. A collective, which joins the process group."""
        self.device = groups.with_index(torch.device(device))
        groups.ensure_process_group(self.device)
        self.kind = kind
        self.compute_dtype = _DTYPES[precision or ("bf16" if self.device.type == "cuda" else "fp32")]
        self._grad_clip = grad_clip
        self._source = "" if isinstance(model, nn.Module) else str(model)
        self._trust_remote_code = model_config.trust_remote_code
        if isinstance(model, nn.Module):
            self.hf_config = copy.deepcopy(model.config)
            switch_dropout_off(self.hf_config)
        else:
            self.hf_config = read_config(self._source, self._trust_remote_code, model_config.override_config)
        self._cost = SequenceCost.from_config(self.hf_config.to_dict())
        self._loss_scale = LossScale(self.compute_dtype)
        self._tokens = 0.0  # of all ranks since the last optimizer step
        self._exports = {}

    def _store(
        self, module: nn.Module, config: Any, mesh: DeviceMesh | None, saves: bool, saved: Collection[str]
    ) -> None:
        """Where an engine that is built keeps its parts; `saves`: in the background."""
        moments = lambda: self._optimizer.state_tensors() if self._optimizer is not None else ()  # noqa: E731
        self._memory = EngineMemory(self.device, module, moments, self._moves_gradients and bool(config.grad_offload))
        learns = self._optimizer is not None
        self._offloads = bool(config.param_offload), bool(config.optimizer_offload) and learns
        self._saves = BackgroundSaves(self.device, mesh, saved) if learns and saves else None

    def _active(self) -> AbstractContextManager[Any]:
        """Around everything that the engine computes."""
        return nullcontext()

    def _learn(self, passes: Passes) -> None:
        """Forward and, from the loss, backward through every micro-batch."""
        raise NotImplementedError

    def _look(self, passes: Passes) -> list[tuple[list[int] | None, Routes]]:
        """The same without gradients; what routers noted, with the rows of each micro-batch."""
        raise NotImplementedError

    def forward_backward(
        self,
        data: DataProto,
        loss_fn: LossFn,
        outputs: Sequence[str],
        temperature: float = 1.0,
        micro: MicroBatching = ALL_ROWS,
        counts: Counts | None = None,
    ) -> Metrics:
        """Add the gradient of this rank's rows of one optimizer step; returns this rank's (sum, count) metrics."""
        if self._optimizer is None:
            raise ValueError("optim: this engine was built without an optimizer (frozen); it cannot train.")
        self._check_fields(outputs, temperature)
        if self._saves is not None:
            self._saves.make_room(self._state)
        if counts is None:
            mine = local_counts(data) if self.collects else Counts(0.0, 0.0)
            tokens, sequences = groups.summed([mine.tokens, mine.sequences], self.device)
            counts = Counts(tokens, sequences)
        self._tokens += counts.tokens
        sums = MetricSums()

        def use(fields: dict[str, torch.Tensor], part: DataProto, rows: list[int] | None) -> torch.Tensor:
            if rows is None:
                return sum((value.sum() for value in fields.values()), start=torch.zeros((), device=self.device)) * 0.0
            loss, metrics = loss_fn(fields, self._on_device(part), counts)
            for name, (total, count) in metrics.items():
                sums.add(name, total, count)
            return loss * self._loss_scale.value

        with self._active():
            self._learn(Passes(data, tuple(outputs), temperature, micro, use))
            measured = self._routers.measured() if self._routers is not None else {}
        for name, value in measured.items() if self._gives else ():
            sums.add(name, value, 1.0)
        return sums.result()

    def optimizer_step(self) -> dict[str, float]:
        """Clip, step, advance the schedule, zero the gradients; or, on all ranks, only the last (see `step_checks`)."""
        if self._optimizer is None:
            raise ValueError("optim: this engine was built without an optimizer (frozen); it cannot step.")
        self._memory.before_change()
        with self._active():
            self._optimizer.gather_gradients()
            lr = self._optimizer.lr
            tokens, self._tokens = self._tokens, 0.0
            scaled_norm, weight_norm = self._optimizer.norms() if tokens else (0.0, 0.0)
            grad_norm = scaled_norm / self._loss_scale.value
            weight_rms = weight_norm / math.sqrt(self._optimizer.elements)
            reason = reason_against(tokens, grad_norm, self._loss_scale.can_fall, lr, weight_rms)
            if reason is None:
                clip = min(1.0, self._grad_clip / (grad_norm + 1e-6)) if self._grad_clip is not None else 1.0
                if clip < 1.0 or self._loss_scale.value != 1.0:
                    self._optimizer.scale_gradients(clip / self._loss_scale.value)
                self._optimizer.step()
            if tokens:
                self._loss_scale.update(math.isfinite(grad_norm))
            self._optimizer.zero_grad()
        return step_metrics(grad_norm, lr, reason)

    def sound(self, thorough: bool) -> bool:
        """Whether the weights are finite; `thorough`: and what they give for a few tokens, too. Alike on all ranks."""
        if self._optimizer is not None:
            with self._active():
                if not math.isfinite(self._optimizer.weight_norm()):
                    return False
        if not thorough:
            return True
        ids = torch.arange(1, 9)[None] % self.hf_config.get_text_config().vocab_size
        tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "responses": ids[:, 4:]}
        with force_eager(self._compiled):
            found = self._found(DataProto.from_dict(tokens), FIELDS_OF_KIND[self.kind][:1], 1.0, ALL_ROWS)
        finite = all(bool(value.isfinite().all()) for value in found.values())
        return groups.largest(int(not finite), self.device) == 0

    def infer(
        self,
        data: DataProto,
        outputs: Sequence[str],
        temperature: float = 1.0,
        micro: MicroBatching = ALL_ROWS,
        top_k: int = 0,
    ) -> DataProto:
        """The fields [B, R] (`FIELDS_OF_ROWS`: [B]) without gradient, float32 on the CPU, in the order of the rows; on
        a rank that has no outputs, none."""
        keys = ["input_ids", "attention_mask"] + (["responses"] if self.kind != "sequence_classification" else [])
        keys += [ROUTED] if ROUTED in data.batch.keys() else []
        keys += [ALTERNATIVES] if "other_log_probs" in outputs else []
        inputs = data.select(batch_keys=keys, non_tensor_batch_keys=[], meta_info_keys=[])
        expect(len(data))
        outputs = [*outputs, *(TOP if top_k else ())]
        found = self._found(inputs, outputs, temperature, micro, top_k)
        return DataProto.from_dict(found) if found else DataProto()

    @torch.no_grad()
    def _found(
        self, data: DataProto, outputs: Sequence[str], temperature: float, micro: MicroBatching, top_k: int = 0
    ) -> dict[str, torch.Tensor]:
        fields = tuple(name for name in outputs if name != ROUTED)
        self._check_fields(fields, temperature)
        noting = self._routers if ROUTED in outputs else None
        if ROUTED in outputs and noting is None:
            raise ValueError(f"outputs: {ROUTED} of a {self.hf_config.model_type} model, which has no experts.")
        order: list[int] = []
        parts: dict[str, list[torch.Tensor]] = {name: [] for name in fields}

        def use(values: dict[str, torch.Tensor], part: DataProto, rows: list[int] | None) -> torch.Tensor:
            if rows is not None:
                order.extend(rows)
                for name, value in values.items():
                    parts[name].append(value)
            return torch.zeros((), device=self.device)

        with self._active():
            routes = self._look(Passes(data, fields, temperature, micro, use, top_k, noting is not None))
            found = {ROUTED: noting.noted(data, routes)} if noting is not None else {}
        if not self._gives:
            return {}
        for name, values in parts.items():
            shape = () if name in FIELDS_OF_ROWS else (data.batch["responses"].shape[1],)
            more = values[0].shape[1 + len(shape) :] if values else ()
            dtype = torch.int32 if name == "top_ids" else torch.float32
            found[name] = torch.zeros((len(data), *shape, *more), dtype=dtype)
            if order:
                found[name][order] = (
                    torch.cat(values).to(dtype).cpu()
                )  # the first time that the host waits for the device
        return found

    def _check_fields(self, fields: Sequence[str], temperature: float) -> None:
        unknown = set(fields) - set(FIELDS_OF_KIND[self.kind])
        if unknown or not fields:
            raise ValueError(
                f"outputs: {sorted(fields)} of a {self.kind} model; it gives {', '.join(FIELDS_OF_KIND[self.kind])}."
            )
        if temperature <= 0:
            raise ValueError(f"temperature: {temperature} is not above 0; log-probabilities need one that is.")

    def _on_device(self, part: DataProto) -> DataProto:
        told = (ROUTED, ALTERNATIVES)  # what routers and heads have been told
        tensors = {name: value for name, value in part.batch.items() if name not in told}
        moved = zip(tensors, copy_to_device(list(tensors.values()), self.device), strict=True)
        return DataProto.from_dict(dict(moved), part.non_tensor_batch, part.meta_info)


def compile_each_layer(layers: Iterable[nn.Module]) -> None:
    """Compile each layer's pass for any number of tokens; layers of one kind share the code."""
    for layer in layers:
        layer.compile(dynamic=True)


@contextmanager
def explain_compile_errors(compiled: bool, name: str) -> Iterator[None]:
    """Around a pass of compiled layers: a compiler that fails (or is missing) is no riddle. `name` of the model."""
    if not compiled:
        yield
        return
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as error:
        raise RuntimeError(
            f"use_torch_compile: the layers of {name} could not be compiled "
            f"({str(error).strip().splitlines()[0]}). Set use_torch_compile=False."
        ) from error


def force_eager(compiled: bool) -> AbstractContextManager[Any]:
    """For a few tokens: compiling a pass of their kind would take longer than all of them together."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
