"""BaseTrainEngine: forward, backward and optimizer steps, shared by all training engines."""

from __future__ import annotations

import copy
import logging
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from verl.config.engine import OptimConfig
from verl.models.forward import FIELDS_OF_KIND, FIELDS_OF_ROWS
from verl.models.loading import ModelKind, disable_dropout, read_config
from verl.protocol import DataProto
from verl.utils.balancing import SequenceCost
from verl.utils.device import copy_to_device
from verl.utils.progress import expect
from verl.workers.engine.base import ALL_ROWS, TOP_K_FIELDS, Counts, LossFn, Metrics, MicroBatching
from verl.workers.engine.common import groups
from verl.workers.engine.common.engine_checkpoint import BackgroundSaver, EngineCheckpointMixin
from verl.workers.engine.common.micro_batches import MetricSums, local_counts
from verl.workers.engine.common.offload import EngineMemory
from verl.workers.engine.common.optim import RECOMPILES, LossScale, skip_reason, step_metrics
from verl.workers.engine.common.routers import ROUTED_EXPERTS, Routers, Routes

TEACHER_TOP_IDS = "teacher_top_ids"
"""Column [B, R, K] with the token ids of the field `other_log_probs`."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class ModelPass:
    """One pass of all rows of a rank through the model, in micro-batches."""

    data: DataProto
    fields: tuple[str, ...]
    temperature: float
    micro: MicroBatching
    on_outputs: Callable[[dict[str, torch.Tensor], DataProto, list[int] | None], torch.Tensor]
    """Called with the fields of a micro-batch, the micro-batch and its row indices; returns the scaled loss for the
    backward pass. The indices are None for a filler, which only takes part in the collectives of other ranks."""
    top_k: int = 0
    record_routing: bool = False
    """Whether routers record the experts they select."""


class EngineOptimizer(Protocol):
    """AdamW over this rank's trainable weights, with its schedule. Most methods are collectives."""

    @property
    def lr(self) -> float: ...
    @property
    def elements(self) -> int:
        """Number of trainable weights over all ranks."""

    def gather_gradients(self) -> None:
        """Finish the reduction of gradients over ranks after the last micro-batch. RuntimeError without gradients."""

    def norms(self) -> tuple[float, float]:
        """Return the norms of gradients and weights, equal on every rank."""

    def weight_norm(self) -> float: ...
    def scale_gradients(self, factor: float) -> None: ...
    def step(self) -> None:
        """Step every weight that has a gradient, and the schedule."""

    def zero_grad(self) -> None: ...
    def state_tensors(self) -> list[torch.Tensor]:
        """Return this rank's optimizer state, without weights and gradients."""


class BaseTrainEngine(EngineCheckpointMixin):
    """Implements `verl.workers.engine.base.TrainEngine`; subclasses implement `_run_training` and `_run_inference`."""

    collects: bool
    optimizer: EngineOptimizer | None
    compiled: bool
    _graphs = 0
    """Graphs compiled until the last optimizer step."""
    _routers: Routers | None
    """Routers of a mixture-of-experts model, if they are replayed or measured."""
    _has_outputs: bool
    """Whether this rank computes outputs (the last pipeline stage)."""
    _supports_grad_offload: ClassVar[bool] = False
    """Whether `grad_offload` keeps gradients of earlier micro-batches in host memory."""

    @classmethod
    def from_config(
        cls,
        model: str,
        kind: ModelKind,
        model_config: Any,
        block: Any,
        device: torch.device,
        optim: OptimConfig | None = None,
        grad_clip: float | None = None,
        router_replay: bool = False,
    ) -> Any:
        """Build the engine from a role's configuration block; without `optim` the model is frozen."""
        trains, engine = optim is not None, cast(Any, cls)
        return engine(
            model,
            kind,
            model_config=model_config,
            optim=optim,
            grad_clip=grad_clip,
            total_steps=optim.total_training_steps if optim is not None else None,
            device=device,
            compile_layers=block.use_torch_compile,
            background_save=trains and block.checkpoint.snapshot is not False,
            save_contents=block.checkpoint.save_contents if trains else (),
            router_replay=router_replay,
            **cls._backend_arguments(block),
        )

    @classmethod
    def _backend_arguments(cls, block: Any) -> dict[str, Any]:
        """Return the constructor arguments of this engine only, including `engine_config`."""
        raise NotImplementedError

    def _init_common(
        self,
        model: str | os.PathLike | nn.Module,
        kind: ModelKind,
        model_config: Any,
        precision: str | None,
        device: torch.device | str,
        grad_clip: float | None,
    ) -> None:
        """Join the process group and read the model's config, before the model is built. A collective."""
        self.device = groups.with_device_index(torch.device(device))
        groups.ensure_process_group(self.device)
        self.kind = kind
        self.compute_dtype = _DTYPES[precision or ("bf16" if self.device.type == "cuda" else "fp32")]
        self._grad_clip = grad_clip
        self._source = "" if isinstance(model, nn.Module) else str(model)
        self._trust_remote_code = model_config.trust_remote_code
        if isinstance(model, nn.Module):
            self.hf_config = copy.deepcopy(model.config)
            disable_dropout(self.hf_config)
        else:
            self.hf_config = read_config(self._source, self._trust_remote_code, model_config.override_config)
        self.cost = SequenceCost.from_config(self.hf_config.to_dict())
        self._loss_scale = LossScale(self.compute_dtype)
        self._step_tokens = 0.0  # over all ranks, since the last optimizer step
        self._exports = {}

    def _init_storage(
        self,
        module: nn.Module,
        config: Any,
        mesh: DeviceMesh | None,
        background_save: bool,
        save_contents: Collection[str],
    ) -> None:
        """Set up offloading and background saves of a built engine."""
        offload_gradients = self._supports_grad_offload and bool(config.grad_offload)
        self.memory = EngineMemory(self.device, module, self._optimizer_tensors, offload_gradients)
        trains = self.optimizer is not None
        self._offloads = bool(config.param_offload), bool(config.optimizer_offload) and trains
        self._saver = BackgroundSaver(self.device, mesh, save_contents) if trains and background_save else None

    def _optimizer_tensors(self) -> list[torch.Tensor]:
        return self.optimizer.state_tensors() if self.optimizer is not None else []

    def _compute_context(self) -> AbstractContextManager[Any]:
        """Context of all computation of the engine."""
        return nullcontext()

    def _run_training(self, run: ModelPass) -> None:
        """Run forward and backward passes of every micro-batch."""
        raise NotImplementedError

    def _pass_metrics(self) -> Metrics:
        """Return metrics of the engine about the last training pass."""
        return {}

    def _run_inference(self, run: ModelPass) -> list[tuple[list[int] | None, Routes]]:
        """Run forward passes without gradients; return row indices and recorded routing of each micro-batch."""
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
        """See `TrainEngine.forward_backward`."""
        if self.optimizer is None:
            raise ValueError("optim: this engine was built without an optimizer (frozen) and cannot train.")
        self._check_fields(outputs, temperature)
        if self._saver is not None:
            self._saver.preallocate(self._state)
        if counts is None:
            local = local_counts(data) if self.collects else Counts(0.0, 0.0)
            tokens, sequences = groups.sum_over_ranks([local.tokens, local.sequences], self.device)
            counts = Counts(tokens, sequences)
        self._step_tokens += counts.tokens
        sums = MetricSums()

        def loss_of(fields: dict[str, torch.Tensor], part: DataProto, rows: list[int] | None) -> torch.Tensor:
            if rows is None:  # a filler: a zero loss that depends on all outputs
                return sum((value.sum() for value in fields.values()), start=torch.zeros((), device=self.device)) * 0.0
            loss, metrics = loss_fn(fields, self._move_to_device(part), counts)
            for name, (total, count) in metrics.items():
                sums.add(name, total, count)
            return loss * self._loss_scale.value

        with self._compute_context():
            self._run_training(ModelPass(data, tuple(outputs), temperature, micro, loss_of))
            expert_load = self._routers.load_metrics() if self._routers is not None else {}
        for name, value in expert_load.items() if self._has_outputs else ():
            sums.add(name, value, 1.0)
        for name, (total, count) in self._pass_metrics().items():
            sums.add(name, total, count)
        return sums.result()

    def optimizer_step(self) -> dict[str, float]:
        """See `TrainEngine.optimizer_step`; `skip_reason` decides whether the step is taken."""
        if self.optimizer is None:
            raise ValueError("optim: this engine was built without an optimizer (frozen) and cannot step.")
        self.memory.prepare_update()
        with self._compute_context():
            self.optimizer.gather_gradients()
            lr = self.optimizer.lr
            tokens, self._step_tokens = self._step_tokens, 0.0
            scaled_norm, weight_norm = self.optimizer.norms() if tokens else (0.0, 0.0)
            grad_norm = scaled_norm / self._loss_scale.value
            weight_rms = weight_norm / math.sqrt(self.optimizer.elements)
            reason = skip_reason(tokens, grad_norm, self._loss_scale.can_decrease, lr, weight_rms)
            if reason is None:
                clip = min(1.0, self._grad_clip / (grad_norm + 1e-6)) if self._grad_clip is not None else 1.0
                if clip < 1.0 or self._loss_scale.value != 1.0:
                    self.optimizer.scale_gradients(clip / self._loss_scale.value)
                self.optimizer.step()
            if tokens:
                self._loss_scale.update(math.isfinite(grad_norm))
            self.optimizer.zero_grad()
        return step_metrics(grad_norm, lr, reason) | self._compile_metrics()

    def _compile_metrics(self) -> dict[str, float]:
        """Return `recompiles`: graphs that this process has compiled since the last step; {} if it compiles none."""
        if not self.compiled:
            return {}
        before, self._graphs = self._graphs, compiled_graphs()
        return {RECOMPILES: float(self._graphs - before)}

    def weights_finite(self, thorough: bool) -> bool:
        """See `TrainEngine.weights_finite`; equal on all ranks."""
        if self.optimizer is not None:
            with self._compute_context():
                if not math.isfinite(self.optimizer.weight_norm()):
                    return False
        if not thorough:
            return True
        ids = torch.arange(1, 9)[None] % self.hf_config.get_text_config().vocab_size
        tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "responses": ids[:, 4:]}
        with force_eager(self.compiled):
            fields = self._infer_fields(DataProto.from_dict(tokens), FIELDS_OF_KIND[self.kind][:1], 1.0, ALL_ROWS)
        finite = all(bool(value.isfinite().all()) for value in fields.values())
        return groups.max_over_ranks(int(not finite), self.device) == 0

    def infer(
        self,
        data: DataProto,
        outputs: Sequence[str],
        temperature: float = 1.0,
        micro: MicroBatching = ALL_ROWS,
        top_k: int = 0,
    ) -> DataProto:
        """See `TrainEngine.infer`."""
        keys = ["input_ids", "attention_mask"] + (["responses"] if self.kind != "sequence_classification" else [])
        keys += [ROUTED_EXPERTS] if ROUTED_EXPERTS in data.batch.keys() else []
        keys += [TEACHER_TOP_IDS] if "other_log_probs" in outputs else []
        inputs = data.select(batch_keys=keys, non_tensor_batch_keys=[], meta_info_keys=[])
        expect(len(data))
        outputs = [*outputs, *(TOP_K_FIELDS if top_k else ())]
        with force_eager(self.compiled and bool(data.meta_info.get("eager"))):
            fields = self._infer_fields(inputs, outputs, temperature, micro, top_k)
        return DataProto.from_dict(fields) if fields else DataProto()

    @torch.no_grad()
    def _infer_fields(
        self, data: DataProto, outputs: Sequence[str], temperature: float, micro: MicroBatching, top_k: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return the fields on the CPU in row order; {} on a rank without outputs."""
        fields = tuple(name for name in outputs if name != ROUTED_EXPERTS)
        self._check_fields(fields, temperature)
        recording = self._routers if ROUTED_EXPERTS in outputs else None
        if ROUTED_EXPERTS in outputs and recording is None:
            raise ValueError(
                f"outputs: {ROUTED_EXPERTS}: this {self.hf_config.model_type} model has no routers to record."
            )
        order: list[int] = []
        parts: dict[str, list[torch.Tensor]] = {name: [] for name in fields}

        def collect(values: dict[str, torch.Tensor], part: DataProto, rows: list[int] | None) -> torch.Tensor:
            if rows is not None:
                order.extend(rows)
                for name, value in values.items():
                    parts[name].append(value)
            return torch.zeros((), device=self.device)

        with self._compute_context():
            run = ModelPass(data, fields, temperature, micro, collect, top_k, recording is not None)
            routes = self._run_inference(run)
            result = {ROUTED_EXPERTS: recording.recorded(data, routes)} if recording is not None else {}
        if not self._has_outputs:
            return {}
        for name, values in parts.items():
            shape = () if name in FIELDS_OF_ROWS else (data.batch["responses"].shape[1],)
            extra_dims = values[0].shape[1 + len(shape) :] if values else ()
            dtype = torch.int32 if name == "top_ids" else torch.float32
            result[name] = torch.zeros((len(data), *shape, *extra_dims), dtype=dtype)
            if order:
                result[name][order] = torch.cat(values).to(dtype).cpu()  # the first host-device synchronisation
        return result

    def _check_fields(self, fields: Sequence[str], temperature: float) -> None:
        unknown = set(fields) - set(FIELDS_OF_KIND[self.kind])
        if unknown or not fields:
            raise ValueError(
                f"outputs: {sorted(fields)} are not fields of a {self.kind} model. "
                f"Choose from: {', '.join(FIELDS_OF_KIND[self.kind])}."
            )
        if temperature <= 0:
            raise ValueError(f"temperature: {temperature} is not above 0, as log-probabilities require.")

    def _move_to_device(self, part: DataProto) -> DataProto:
        model_inputs = (ROUTED_EXPERTS, TEACHER_TOP_IDS)  # used by the forward pass, not by losses
        tensors = {name: value for name, value in part.batch.items() if name not in model_inputs}
        moved = zip(tensors, copy_to_device(list(tensors.values()), self.device), strict=True)
        return DataProto.from_dict(dict(moved), part.non_tensor_batch, part.meta_info)


def compile_each_layer(layers: Iterable[nn.Module]) -> None:
    """Compile the forward pass of each layer for any number of tokens; layers of one class share the code.

    Activation checkpointing that transformers has enabled moves into the compiled code, which recomputes only what the
    backward pass reads. It skips, for example, a layer's last projection, about a quarter of its matrix operations. The
    outputs of attention are saved.
    """
    options = _inductor_options()
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_hide_checkpoint_advice)
    for layer in layers:
        if getattr(layer, "gradient_checkpointing", False):
            layer.gradient_checkpointing = False
            layer.forward = partial(_checkpointed, layer, torch.compile(layer.forward, dynamic=True, options=options))
        layer.compile(dynamic=True, options=options)


def _checkpointed(layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The forward pass of a layer, recomputed in the backward pass.

    `forward` is compiled: if it has graph breaks, Dynamo does not compile this function, but the parts of `forward`.
    """
    if not (layer.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():
        return checkpoint(forward, *args, use_reentrant=False, context_fn=_SAVE_ATTENTION, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)  # a policy would prevent compilation of the parts


def _saves_attention(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """Save the outputs of attention: they are as large as the input of the layer, which is saved anyway, and of all
    operations their computation takes the longest per byte, in particular for long sequences."""
    return CheckpointPolicy.MUST_SAVE if str(operator) in _ATTENTION_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


_ATTENTION_OPERATORS = frozenset(
    {
        "verl.tree_attention.default",
        "torch_attn._varlen_attn.default",
        "flash_attn._flash_attn_varlen_forward.default",
    }
)
_SAVE_ATTENTION: Any = partial(create_selective_checkpoint_contexts, _saves_attention)
# Without it, compiled layers are not cached across processes.
_SAVE_ATTENTION.cache_hash = f"save {sorted(_ATTENTION_OPERATORS)}"


def _hide_checkpoint_advice(record: logging.LogRecord) -> bool:
    """Return False for torch's advice against operations in place: nothing changes the saved outputs in place."""
    return "context_fn" not in record.getMessage()


def keep_head_size_constant(model: nn.Module) -> None:
    """Make the size of the last dimension of cos and sin, and thereby of a head, a constant in compiled layers.

    Dynamo treats attributes such as `head_dim` of modules that FSDP manages as dynamic. Kernels of the rotary embedding
    would divide by it for each element, and take ten times as long.
    """
    for name, module in model.named_modules():
        if name.rpartition(".")[2].startswith("rotary_emb"):
            module.register_forward_hook(_mark_last_dimension_static)


def _mark_last_dimension_static(_module: nn.Module, _inputs: Any, output: Any) -> None:
    for part in output if isinstance(output, tuple) else (output,):
        if isinstance(part, torch.Tensor):
            torch._dynamo.mark_static(part, part.dim() - 1)


def _inductor_options() -> dict[str, bool]:
    """Return options of Inductor that prevent recompilation when the size of a pass crosses a threshold: by default, it
    fuses reductions over tokens with reductions over features only in large passes."""
    from torch._inductor import config

    if hasattr(config.triton, "mix_order_reduction_non_strict_mode"):
        return {"triton.mix_order_reduction_non_strict_mode": True}  # in passes of all sizes
    return {"triton.mix_order_reduction": False} if hasattr(config.triton, "mix_order_reduction") else {}


def compiled_graphs() -> int:
    """Return the number of graphs that torch.compile has compiled in this process, for all of its models."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@contextmanager
def compiled_pass(compiled: bool, name: str) -> Iterator[None]:
    """Context of a pass through layers that may be compiled: applies compiler settings, and raises compiler errors as
    RuntimeError with the model's name and a remedy."""
    if not compiled:
        yield
        return
    from torch._dynamo import config
    from torch._dynamo.exc import TorchDynamoException

    try:
        # Floats such as the epsilon of a norm never change. As dynamic values they would make Dynamo compile twice: it
        # restarts with constants when a float turns out to be an argument of a kernel.
        with config.patch(specialize_float=True):
            yield
    except TorchDynamoException as error:
        raise RuntimeError(
            f"use_torch_compile: the layers of {name} could not be compiled "
            f"({str(error).strip().splitlines()[0]}). Set use_torch_compile=False."
        ) from error


def force_eager(compiled: bool) -> AbstractContextManager[Any]:
    """Context that runs compiled layers eagerly, for passes of a few tokens that take less time than compilation."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
