"""MegatronEngine: a Hugging Face model in training on Megatron-Core's layers, schedules and optimizer."""

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
from verl.models.core.architecture import CoreArchitecture
from verl.models.loading import ModelKind, empty_model
from verl.models.packing import PackedRows, packed_rows, with_alternatives
from verl.models.sharing import padded_rows, shared_rows
from verl.models.ulysses import SequenceParallel
from verl.protocol import DataProto
from verl.utils.progress import tick
from verl.workers.engine.common import groups
from verl.workers.engine.common.base_engine import (
    ALTERNATIVES,
    Passes,
    TrainedEngine,
    compile_each_layer,
    explain_compile_errors,
)
from verl.workers.engine.common.checkpoint_compatibility import about
from verl.workers.engine.common.engine_checkpoint import checked
from verl.workers.engine.common.micro_batches import micro_batches
from verl.workers.engine.common.routers import Routers, Routes
from verl.workers.engine.megatron.bridge import BridgedWeights, bridge_of
from verl.workers.engine.megatron.layout import CoreLayout, Sizes
from verl.workers.engine.megatron.loading import fill
from verl.workers.engine.megatron.model import CoreModel, core_config, core_names, ddp_config
from verl.workers.engine.megatron.optimizer import CoreAdamW
from verl.workers.engine.megatron.router_replay import core_routers
from verl.workers.engine.megatron.state import CoreState, is_core_checkpoint, load_core_weights
from verl.workers.engine.megatron.weights import CoreWeights


class MegatronEngine(TrainedEngine):
    """See `verl.workers.engine.base.TrainEngine`.

    Ranks that share rows: those of a tensor group each have a part of every matrix, the stages of a pipeline their
    layers, those of a context group a part of the tokens. Outputs are on the last stage. Master weights, gradients and
    moments are float32; matrices are multiplied in `megatron_config.dtype`. Without `optim` the model is frozen.
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
        snapshots: bool = True,
        saved: Collection[str] = (),
        replays: bool = False,
    ) -> None:
        """`model` is a local folder or hub name, or a model of that kind in memory (a ValueModel, for `value`).

        `compile_layers` (on CUDA only), `snapshots`, `saved` and `replays` are as FSDPEngine has them.
        """
        self._begin(model, kind, model_config, engine_config.dtype, device, grad_clip)
        self.layout = layout = CoreLayout.of(Sizes.of(engine_config), self.device)
        self.dp_rank, self.dp_size = layout.dp.rank, layout.dp.size
        self._gives = layout.pp.rank == layout.pp.size - 1
        self.collects = self._gives and layout.tp.rank == 0 and layout.cp.rank == 0
        self._sharing = (
            SequenceParallel(layout.cp.group, layout.cp.size, layout.cp.rank) if layout.cp.size > 1 else None
        )
        self._pad_token_id = getattr(self.hf_config, "pad_token_id", None) or 0
        self.arch = CoreArchitecture.of(self.hf_config)
        self._compiled = compile_layers and self.device.type == "cuda"
        bridge = bridge_of(engine_config, self.arch, kind, self.hf_config, self.device)
        with layout.active():
            self._build(model_config, engine_config, optim is not None, replays)
            skeleton = empty_model(self.hf_config, kind, self.compute_dtype, self._trust_remote_code)
            named = [(part, core_names(part, layout)) for part in self.models]
            given = named, layout, self.arch, kind, skeleton, self.device
            self._weights = CoreWeights(*given) if bridge is None else BridgedWeights(bridge, *given)
            self._optimizer: CoreAdamW | None = None
            if optim is not None:
                self._optimizer = CoreAdamW(self.chunks, optim, total_steps, bool(engine_config.grad_offload))
            self.fill(model)
        self._state = CoreState(
            skeleton,
            about(self.hf_config, kind),
            self._weights,
            self.chunks,
            self._optimizer.core if self._optimizer is not None else None,
            self._optimizer.schedules if self._optimizer is not None else (),
            self._loss_scale,
            self.device,
        )
        self._store(nn.ModuleList(self.models), engine_config, None, snapshots, saved)

    def fill(self, model: str | os.PathLike | nn.Module) -> None:
        """With a Hugging Face model's weights, in files or in memory; a collective."""
        core = self._optimizer.core if self._optimizer is not None else None
        fill(self._weights, model, self.hf_config, self._trust_remote_code, core)

    def _build(self, model_config: Any, engine_config: MegatronConfig, train: bool, replays: bool) -> None:
        """Empty, with its buffers."""
        checkpointing = train and bool(getattr(model_config, "enable_gradient_checkpointing", False))
        config = core_config(
            self.arch, engine_config, self.layout, self.compute_dtype, checkpointing if train else None, self._compiled
        )
        stages = range(self.layout.vpp) if self.layout.vpp > 1 else [None]
        self.models = [
            CoreModel(config, self.kind, self.hf_config, self.layout, self.device, stage) for stage in stages
        ]
        # Layers that exchange tensors with other ranks are compiled in parts, by Core's fused functions.
        if self._compiled and self.layout.tp.size == self.layout.cp.size == 1:
            layers = (layer for part in self.models for layer in part.decoder.layers)
            compile_each_layer(layer for layer in layers if not layer.is_moe_layer)
        self._routers: Routers | None = None
        if self.arch.experts is not None:
            self._routers = core_routers(self.models, self.arch, self.layout, self.device, replays)
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
    def of_block(cls, model: str, kind: ModelKind, model_config: Any, block: Any, *more: Any, **further: Any) -> Any:
        """As a role's configuration block says."""
        engine = super().of_block(model, kind, model_config, block, *more, **further)
        if block.megatron_config.use_dist_checkpointing:
            engine.load(block.megatron_config.dist_checkpointing_path, ("model",))
        return engine

    @classmethod
    def _own_arguments(cls, block: Any) -> dict[str, Any]:
        return {"engine_config": block.megatron_config}

    # ---------------------------------------------------------------- passes

    def _active(self) -> AbstractContextManager[None]:
        return self.layout.active()

    def _learn(self, passes: Passes) -> None:
        assert self._optimizer is not None
        self._optimizer.take_gradients()
        self._run(passes, learns=True)

    def _look(self, passes: Passes) -> list[tuple[list[int] | None, Routes]]:
        done = self._run(passes, learns=False)
        return [(part.indices, part.routes) for part in done if part.routes is not None]

    def base_weights(self) -> AbstractContextManager[None]:
        """There are no adapters here to compute without."""
        return nullcontext()

    def load(self, path: str | os.PathLike, contents: Collection[str] = ("model", "optimizer", "extra")) -> None:
        """Read back what any engine saved, on any layout; or the weights of a checkpoint that Core itself wrote."""
        folder = checked(path, contents)
        with self.layout.active():
            if not is_core_checkpoint(folder):
                super().load(folder, contents)
                return
            self.to("device")
            self._memory.before_change()
            load_core_weights(self.models, self._optimizer.core if self._optimizer is not None else None, folder)

    # ---------------------------------------------------------------- parts

    def _run(self, passes: Passes, learns: bool) -> list[MicroBatch]:
        """What it ran."""
        for chunk in self.chunks:
            chunk.train(learns)
        parts = self._micro_batches(passes)
        with explain_compile_errors(self._compiled, self.arch.family):
            run_micro_batches(self.chunks, self.layout, parts, passes, backward=learns)
        return parts

    def _micro_batches(self, passes: Passes) -> list[MicroBatch]:
        """As many on every rank. Chunks of stages that take turns want a multiple of the stages, all of one length:
        each knows what the next message holds."""
        in_turn, stages = self.layout.vpp > 1, self.layout.pp.size

        def wanted(count: int) -> int:
            most = groups.largest(count, self.device)
            return math.ceil(most / stages) * stages if in_turn else most

        parts = list(micro_batches(passes.data, passes.micro.shared_by(self.layout.cp.size), self._cost, wanted))
        width = passes.data.batch["responses"].shape[1] if self.kind != "sequence_classification" else 0
        packed = [
            packed_rows(part.batch["input_ids"], part.batch["attention_mask"], width, self._pad_token_id)
            for part, _ in parts
        ]
        if "other_log_probs" in passes.fields:
            packed = [
                with_alternatives(rows, part.batch[ALTERNATIVES]) for rows, (part, _) in zip(packed, parts, strict=True)
            ]
        longest = max((rows.packing.total for rows in packed), default=0) if in_turn else 0
        return [
            self._micro_batch(part, indices, self._placed(rows, longest), (len(part), width), passes.notes)
            for (part, indices), rows in zip(parts, packed, strict=True)
        ]

    def _micro_batch(
        self, part: DataProto, indices: list[int] | None, rows: PackedRows, shape: tuple[int, int], notes: bool
    ) -> MicroBatch:
        routes = None
        if self._routers is not None:
            routes = self._routers.routes(part, rows.packing.total, indices is None, notes)
        return MicroBatch(part, indices, rows, shape, routes)

    def _placed(self, rows: PackedRows, at_least: int) -> PackedRows:
        """This rank's share of the rows, on its device; ranks that share tokens have equally many."""
        sharing = self.layout.tp.size * self.layout.cp.size
        rows = padded_rows(rows, math.ceil(max(1, at_least, rows.packing.total) / sharing) * sharing)
        return (rows if self._sharing is None else shared_rows(rows, self._sharing)).to(self.device)


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one pass through all stages."""

    part: DataProto
    indices: list[int] | None
    """Of its rows in the batch; None: a filler, which keeps step with other ranks."""
    rows: PackedRows
    """On the device."""
    shape: tuple[int, int]
    routes: Routes | None = None
    """Of a mixture of experts."""


def run_micro_batches(
    chunks: Sequence[Any], layout: CoreLayout, micro_batches: Sequence[MicroBatch], passes: Passes, *, backward: bool
) -> None:
    """Each of `micro_batches` forward through this rank's `chunks` and, with `backward`, back again."""
    if not micro_batches:
        return
    no_tokens = torch.zeros((), dtype=torch.int, device=micro_batches[0].rows.input_ids.device)

    def forward_step(source: Iterator[MicroBatch], chunk: Any) -> tuple[Any, Callable[..., Any]]:
        micro = next(source)
        output = chunk(micro.rows, passes.fields, micro.shape, passes.temperature, passes.top_k, micro.routes)
        if source is sources[0]:
            tick(len(micro.indices or ()))
        # Core adds up tokens to divide gradients by, and leaves the loss of a triple as it is.
        return output, lambda found: (passes.use(found, micro.part, micro.indices), no_tokens, None)

    sources = [iter(micro_batches) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=sources,
        model=list(chunks),
        num_microbatches=len(micro_batches),
        # Chunks that take turns: of all of them alike. Otherwise each stage tells the next.
        seq_length=micro_batches[0].rows.input_ids.shape[1] * layout.cp.size,
        micro_batch_size=1,
        forward_only=not backward,
    )
