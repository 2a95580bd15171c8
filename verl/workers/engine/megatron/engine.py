"""MegatronEngine: a Hugging Face model on Megatron-Core's layers, pipeline schedules and optimizer."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import nn

from verl.config.engine import CriticModelConfig, MegatronConfig, ModelConfig, OptimConfig, RewardModelModelConfig
from verl.models.loading import ModelKind, empty_model
from verl.models.megatron_core import CoreArchitecture
from verl.models.packing import (
    PackedRows,
    packed_rows,
    pad_packed_rows,
    sequence_parallel_rows,
    with_alternatives,
)
from verl.models.ulysses import SequenceParallel
from verl.protocol import DataProto
from verl.utils.progress import tick
from verl.workers.engine.common import groups
from verl.workers.engine.common.base_engine import (
    TEACHER_TOP_IDS,
    BaseTrainEngine,
    ModelPass,
    compile_each_layer,
    compiled_pass,
)
from verl.workers.engine.common.checkpoint_compatibility import model_info
from verl.workers.engine.common.engine_checkpoint import checkpoint_folder
from verl.workers.engine.common.micro_batches import micro_batches
from verl.workers.engine.common.routers import Routers, Routes
from verl.workers.engine.megatron.bridge import BridgedWeights, create_bridge
from verl.workers.engine.megatron.layers import core_routers
from verl.workers.engine.megatron.layout import CoreLayout, ParallelSizes
from verl.workers.engine.megatron.model import MegatronModel, core_config, ddp_config, global_names
from verl.workers.engine.megatron.optimizer import CoreAdamW
from verl.workers.engine.megatron.state import MegatronState, is_core_checkpoint, load_core_weights
from verl.workers.engine.megatron.weights import CoreWeights, load_weights


class MegatronEngine(BaseTrainEngine):
    """Implements `verl.workers.engine.base.TrainEngine`.

    Ranks of a tensor-parallel, pipeline-parallel or context-parallel group share rows: they split matrices, layers or
    tokens. Outputs are on the last pipeline stage. Master weights, gradients and moments are float32; the forward pass
    runs in `megatron_config.dtype`. Without `optim` the model is frozen.
    """

    _weights: CoreWeights

    def __init__(
        self,
        model: str | os.PathLike | nn.Module,
        kind: ModelKind = "causal_lm",
        *,
        model_config: ModelConfig | CriticModelConfig | RewardModelModelConfig,
        engine_config: MegatronConfig,
        optim: OptimConfig | None = None,
        grad_clip: float | None = None,
        total_steps: int | None = None,
        device: torch.device | str = "cpu",
        compile_layers: bool = False,
        background_save: bool = True,
        save_contents: Collection[str] = (),
        router_replay: bool = False,
    ) -> None:
        """Arguments as in FSDPEngine; `compile_layers` has an effect on CUDA only."""
        self._init_common(model, kind, model_config, engine_config.dtype, device, grad_clip)
        self.layout = layout = CoreLayout.get(ParallelSizes.from_config(engine_config), self.device)
        self.dp_rank, self.dp_size = layout.dp.rank, layout.dp.size
        self._has_outputs = layout.pp.rank == layout.pp.size - 1
        self.collects = self._has_outputs and layout.tp.rank == 0 and layout.cp.rank == 0
        self._sequence_parallel = (
            SequenceParallel(layout.cp.group, layout.cp.size, layout.cp.rank) if layout.cp.size > 1 else None
        )
        self._pad_token_id = getattr(self.hf_config, "pad_token_id", None) or 0
        self.arch = CoreArchitecture.from_config(self.hf_config)
        self.compiled = compile_layers and self.device.type == "cuda"
        bridge = create_bridge(engine_config, self.arch, kind, self.hf_config, self.device)
        with layout.activate():
            self._build(model_config, engine_config, optim is not None, router_replay)
            skeleton = empty_model(self.hf_config, kind, self.compute_dtype, self._trust_remote_code)
            named = [(part, global_names(part, layout)) for part in self.models]
            arguments = named, layout, self.arch, kind, skeleton, self.device
            self._weights = CoreWeights(*arguments) if bridge is None else BridgedWeights(bridge, *arguments)
            self.optimizer: CoreAdamW | None = None
            if optim is not None:
                self.optimizer = CoreAdamW(self.chunks, optim, total_steps, bool(engine_config.grad_offload))
            self.load_weights(model)
        self._state = MegatronState(
            skeleton,
            model_info(self.hf_config, kind),
            self._weights,
            self.chunks,
            self.optimizer.core if self.optimizer is not None else None,
            self.optimizer.schedules if self.optimizer is not None else (),
            self._loss_scale,
            self.device,
        )
        self._init_storage(nn.ModuleList(self.models), engine_config, None, background_save, save_contents)

    def load_weights(self, model: str | os.PathLike | nn.Module) -> None:
        """Load the weights of a Hugging Face model, in files or in memory. A collective."""
        core = self.optimizer.core if self.optimizer is not None else None
        load_weights(self._weights, model, self.hf_config, self._trust_remote_code, core)

    def _build(self, model_config: Any, engine_config: MegatronConfig, train: bool, router_replay: bool) -> None:
        """Build the model chunks of this rank with uninitialised weights, wrapped for gradients if they are trained."""
        checkpointing = train and bool(getattr(model_config, "enable_gradient_checkpointing", False))
        config = core_config(
            self.arch, engine_config, self.layout, self.compute_dtype, checkpointing if train else None, self.compiled
        )
        stages = range(self.layout.vpp) if self.layout.vpp > 1 else [None]
        self.models = [
            MegatronModel(config, self.kind, self.hf_config, self.layout, self.device, stage) for stage in stages
        ]
        # Layers with collectives are compiled in parts, by Core's fused functions.
        if self.compiled and self.layout.tp.size == self.layout.cp.size == 1:
            layers = (layer for part in self.models for layer in part.decoder.layers)
            compile_each_layer(layer for layer in layers if not layer.is_moe_layer)
        self._routers: Routers | None = None
        if self.arch.experts is not None:
            self._routers = core_routers(self.models, self.arch, self.layout, self.device, router_replay)
        self.chunks: list[Any] = list(self.models)
        if train:
            ddp = ddp_config(engine_config)
            self.chunks = [
                DistributedDataParallel(config, ddp, chunk, disable_bucketing=number > 0)
                for number, chunk in enumerate(self.models)
            ]
        else:
            for chunk in self.models:
                chunk.requires_grad_(False)

    @classmethod
    def from_config(cls, model: str, kind: ModelKind, model_config: Any, block: Any, *args: Any, **kwargs: Any) -> Any:
        """Build the engine from a role's configuration block, and load its Megatron-Core checkpoint, if any."""
        engine = super().from_config(model, kind, model_config, block, *args, **kwargs)
        if block.megatron_config.use_dist_checkpointing:
            engine.load(block.megatron_config.dist_checkpointing_path, ("model",))
        return engine

    @classmethod
    def _backend_arguments(cls, block: Any) -> dict[str, Any]:
        return {"engine_config": block.megatron_config}

    # ---------------------------------------------------------------- forward and backward

    def _compute_context(self) -> AbstractContextManager[None]:
        return self.layout.activate()

    def _run_training(self, run: ModelPass) -> None:
        assert self.optimizer is not None
        self.optimizer.begin_gradients()
        self._run(run, backward=True)

    def _run_inference(self, run: ModelPass) -> list[tuple[list[int] | None, Routes]]:
        micro = self._run(run, backward=False)
        return [(part.indices, part.routes) for part in micro if part.routes is not None]

    def base_weights(self) -> AbstractContextManager[None]:
        """No effect: this engine does not support adapters."""
        return nullcontext()

    def load(self, path: str | os.PathLike, contents: Collection[str] = ("model", "optimizer", "extra")) -> None:
        """Load a checkpoint of any engine and layout, or the weights of a checkpoint that Megatron-Core wrote."""
        folder = checkpoint_folder(path, contents)
        with self.layout.activate():
            if not is_core_checkpoint(folder):
                super().load(folder, contents)
                return
            self.to("device")
            self.memory.prepare_update()
            load_core_weights(self.models, self.optimizer.core if self.optimizer is not None else None, folder)

    # ---------------------------------------------------------------- internals

    def _run(self, run: ModelPass, backward: bool) -> list[MicroBatch]:
        """Run all micro-batches and return them."""
        for chunk in self.chunks:
            chunk.train(backward)
        parts = self._micro_batches(run)
        with compiled_pass(self.compiled, self.arch.family):
            run_micro_batches(self.chunks, self.layout, parts, run, backward=backward)
        return parts

    def _micro_batches(self, run: ModelPass) -> list[MicroBatch]:
        """Return the micro-batches, equally many on every rank.

        The interleaved schedule (virtual pipeline stages) requires that their number is a multiple of the number of
        stages, and that all have the same length, so that each stage knows the size of the next message.
        """
        interleaved, stages = self.layout.vpp > 1, self.layout.pp.size

        def required_count(count: int) -> int:
            maximum = groups.max_over_ranks(count, self.device)
            return math.ceil(maximum / stages) * stages if interleaved else maximum

        micro = run.micro.scaled_by(self.layout.cp.size)
        parts = list(micro_batches(run.data, micro, self.cost, required_count))
        width = run.data.batch["responses"].shape[1] if self.kind != "sequence_classification" else 0
        packed = [
            packed_rows(part.batch["input_ids"], part.batch["attention_mask"], width, self._pad_token_id)
            for part, _ in parts
        ]
        if "other_log_probs" in run.fields:
            packed = [
                with_alternatives(rows, part.batch[TEACHER_TOP_IDS])
                for rows, (part, _) in zip(packed, parts, strict=True)
            ]
        longest = max((rows.packing.total for rows in packed), default=0) if interleaved else 0
        return [
            self._micro_batch(part, indices, self._to_device(rows, longest), (len(part), width), run.record_routing)
            for (part, indices), rows in zip(parts, packed, strict=True)
        ]

    def _micro_batch(
        self, part: DataProto, indices: list[int] | None, rows: PackedRows, shape: tuple[int, int], record: bool
    ) -> MicroBatch:
        routes = None
        if self._routers is not None:
            routes = self._routers.routes(part, rows.packing, indices is None, record)
        return MicroBatch(part, indices, rows, shape, routes)

    def _to_device(self, rows: PackedRows, at_least: int) -> PackedRows:
        """Return this rank's tokens on its device, padded so that ranks that split tokens have equally many."""
        sharing = self.layout.tp.size * self.layout.cp.size
        rows = pad_packed_rows(rows, math.ceil(max(1, at_least, rows.packing.total) / sharing) * sharing)
        return (rows if self._sequence_parallel is None else sequence_parallel_rows(rows, self._sequence_parallel)).to(
            self.device
        )


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one pass through all pipeline stages."""

    part: DataProto
    indices: list[int] | None
    """Row indices in the batch; None for a filler, which only takes part in collectives."""
    rows: PackedRows
    """On the device."""
    shape: tuple[int, int]
    """(rows, response tokens including padding)."""
    routes: Routes | None = None
    """Expert routing of a mixture-of-experts model."""


def run_micro_batches(
    chunks: Sequence[Any], layout: CoreLayout, micro_batches: Sequence[MicroBatch], run: ModelPass, *, backward: bool
) -> None:
    """Run each micro-batch through this rank's model chunks, by Core's schedule for the layout."""
    if not micro_batches:
        return
    no_tokens = torch.zeros((), dtype=torch.int, device=micro_batches[0].rows.input_ids.device)

    def forward_step(source: Iterator[MicroBatch], chunk: Any) -> tuple[Any, Callable[..., Any]]:
        micro = next(source)
        output = chunk(micro.rows, run.fields, micro.shape, run.temperature, run.top_k, micro.routes)
        if source is sources[0]:
            tick(len(micro.indices or ()))
        # (loss, number of tokens, logged values): with `calculate_per_token_loss`, Core does not divide this loss. The
        # number of tokens would divide gradients in `finalize_model_grads`, which CoreAdamW calls without it.
        return output, lambda fields: (run.on_outputs(fields, micro.part, micro.indices), no_tokens, None)

    sources = [iter(micro_batches) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=sources,
        model=list(chunks),
        num_microbatches=len(micro_batches),
        # Used by the interleaved schedule only; otherwise each stage sends its length to the next.
        seq_length=micro_batches[0].rows.input_ids.shape[1] * layout.cp.size,
        micro_batch_size=1,
        forward_only=not backward,
    )
