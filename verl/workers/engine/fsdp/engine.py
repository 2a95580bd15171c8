"""FSDPEngine: a Hugging Face model in training, sharded over ranks by torch's `fully_shard`."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from verl.config.engine import CriticModelConfig, FSDPConfig, ModelConfig, OptimConfig, RewardModelModelConfig
from verl.models.forward import ResponseModel, front_rows
from verl.models.loading import ModelKind, empty_model, pretrained_model
from verl.models.lora import Adapters
from verl.models.packing import packed_rows, with_alternatives
from verl.models.sharing import shared_rows
from verl.models.trials import check_head, runs_packed
from verl.models.ulysses import check_heads
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
from verl.workers.engine.common.micro_batches import micro_batches, with_last
from verl.workers.engine.common.routers import Routes
from verl.workers.engine.fsdp import sharding
from verl.workers.engine.fsdp.optimizer import ShardedAdamW
from verl.workers.engine.fsdp.router_replay import HFRouters
from verl.workers.engine.fsdp.state import EngineState
from verl.workers.engine.fsdp.weights import ModelWeights


class FSDPEngine(TrainedEngine):
    """See `verl.workers.engine.base.TrainEngine`. Weights are sharded over all ranks of the process group; groups of
    `sequence_parallel_size` neighbours get the same rows and share their tokens.

    Master weights, gradients and moments are float32 shards; matrices are multiplied in `mixed_precision`. Without
    `optim` the model is frozen (a reference, a reward model) and kept in the compute dtype; so is, with
    `model_config.lora_rank`, everything but the adapters (and a value head).
    """

    _weights: ModelWeights
    _routers: HFRouters | None
    _gives = True
    _moves_gradients = True

    def __init__(
        self,
        model: str | os.PathLike | nn.Module,
        kind: ModelKind = "causal_lm",
        *,
        model_config: ModelConfig | CriticModelConfig | RewardModelModelConfig,
        engine_config: FSDPConfig,
        optim: OptimConfig | None = None,
        grad_clip: float | None = None,
        total_steps: int | None = None,
        device: torch.device | str = "cpu",
        sequence_parallel_size: int = 1,
        compile_layers: bool = False,
        snapshots: bool = True,
        saved: Collection[str] = (),
        replays: bool = False,
    ) -> None:
        """`model` is a local folder or hub name, or a model of that kind in memory (a ValueModel, for `value`).

        `compile_layers` has an effect on packed tokens on CUDA only. `snapshots`: what is saved is copied to host
        memory and written while training goes on; memory for `saved`, the contents of checkpoints that are to come, is
        made beside the first update. `replays`: the routers of a mixture go through the experts that rows have in
        `routed_experts`.
        """
        self._begin(model, kind, model_config, engine_config.mixed_precision, device, grad_clip)
        self._sharing = sharding.sequence_parallel(self.device, sequence_parallel_size)
        self.dp_rank = dist.get_rank() // sequence_parallel_size
        self.dp_size = dist.get_world_size() // sequence_parallel_size
        self.collects = self._sharing is None or self._sharing.rank == 0
        self.mesh = sharding.build_mesh(self.device, engine_config.fsdp_size)
        if self._sharing is not None:
            check_heads(self.hf_config, self._sharing.size)
        self._build_model(model, model_config, engine_config, frozen=optim is None)
        compiles = compile_layers and self.device.type == "cuda"
        # Counting costs little, but a layer that is compiled would be left for it.
        measures = optim is not None and not compiles
        self._routers = HFRouters.of(self.model.hf, self._sharing, self.device, replays, measures)
        with self._inference():
            check_head(self.model, self.device)
            self._packs = model_config.use_remove_padding and runs_packed(self.model, self.device)
        if self._sharing is not None and not self._packs:
            raise ValueError(
                "ulysses_sequence_parallel_size: ranks share packed tokens, and this model runs with padding. Set it "
                "to 1, or model.use_remove_padding=True if that is off."
            )
        if replays and not self._packs:
            raise ValueError(
                "router_replay.mode: experts are told for packed tokens, and this model runs with padding. Set it to"
                " disabled, or model.use_remove_padding=True if that is off."
            )
        if not self._packs:
            self._routers = None
        if optim is not None and getattr(model_config, "enable_gradient_checkpointing", False):
            sharding.checkpoint_activations(self.model)
        self._compiled = compiles and self._packs
        if self._compiled:
            compile_each_layer(sharding.outermost_layers(self.model.hf))
        self._optimizer: ShardedAdamW | None = None
        if optim is not None:
            learning = {name: value for name, value in self.model.hf.named_parameters() if value.requires_grad}
            self._optimizer = ShardedAdamW(learning, optim, self.mesh, total_steps)
        self._state = EngineState(
            self.model.hf,
            about(self.hf_config, kind, None if self._adapters is None else self._adapters.about()),
            self._weights,
            self._optimizer,
            self._loss_scale,
            self.device,
            self._source,
        )
        self._store(self.model, engine_config, self.mesh, snapshots, saved)

    @classmethod
    def _own_arguments(cls, block: Any) -> dict[str, Any]:
        return {"engine_config": block.fsdp_config, "sequence_parallel_size": block.ulysses_sequence_parallel_size}

    # ---------------------------------------------------------------- passes

    def _learn(self, passes: Passes) -> None:
        self.model.train()
        for (part, rows), last in with_last(self._micro_batches(passes)):
            if self._one_group and not self._memory.offloads_gradients:
                sharding.finish_with(self.model, last)
            self._memory.before_micro_batch()
            passes.use(self._forward(part, passes, filler=rows is None), part, rows).backward()
            tick(len(rows or ()))

    def _look(self, passes: Passes) -> list[tuple[list[int] | None, Routes]]:
        routes = []
        with self._inference():
            for part, rows in self._micro_batches(passes):
                passes.use(self._forward(part, passes, filler=rows is None), part, rows)
                if passes.notes and self._routers is not None:
                    routes.append((rows, self._routers.current))
                tick(len(rows or ()))
        return routes

    @contextmanager
    def base_weights(self) -> Iterator[None]:
        """Within it a model with adapters computes without them."""
        with self._adapters.off() if self._adapters is not None else nullcontext():
            yield

    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        """Move weights (with any gradients) and moments to host memory ("cpu") or back ("device")."""
        if device == "cpu":
            self._reshard()
        super().to(device, model, optimizer)

    # ---------------------------------------------------------------- parts

    def _build_model(
        self, model: str | os.PathLike | nn.Module, model_config: Any, engine_config: FSDPConfig, frozen: bool
    ) -> None:
        """Empty, sharded, then filled from the one copy that each node's leader reads."""
        adapted = not frozen and not isinstance(model_config, RewardModelModelConfig) and model_config.lora_rank > 0
        master = self.compute_dtype if frozen or adapted else torch.float32
        node = groups.node_group()
        source: nn.Module | None = None
        if node.is_leader and isinstance(model, nn.Module):
            source = model
        elif node.is_leader:
            source = pretrained_model(
                self._source, self.hf_config, self.kind, self._trust_remote_code, learns=not frozen
            )
        hf = empty_model(self.hf_config, self.kind, master, self._trust_remote_code)
        self.model = ResponseModel(hf, self.kind)
        self.model.requires_grad_(not frozen)
        self._adapters = Adapters(hf, self.kind, model_config) if adapted else None
        self._weights = ModelWeights(hf, self._adapters, self.device)
        reshard, prefetch = engine_config.reshard_after_forward, bool(engine_config.forward_prefetch)
        self._one_group = sharding.shard(self.model, self.mesh, self.compute_dtype, reshard, prefetch)
        sharding.fill(self.model.hf, source, node, self.device, self._adapters)

    @contextmanager
    def _inference(self) -> Iterator[None]:
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            # What stays gathered would be used again, stale, after the next optimizer step.
            self._reshard()

    def _reshard(self) -> None:
        for module in sharding.sharded_modules(self.model):
            module.reshard()

    def _micro_batches(self, passes: Passes) -> Iterator[tuple[DataProto, list[int] | None]]:
        """Each micro-batch with its row indices; None for a filler that keeps step with other ranks."""
        shared = passes.micro.shared_by(self._sharing.size if self._sharing else 1)
        return micro_batches(passes.data, shared, self._cost, lambda count: groups.largest(count, self.device))

    def _forward(self, part: DataProto, passes: Passes, filler: bool) -> dict[str, torch.Tensor]:
        """The fields of one micro-batch, which stays where it is."""
        batch = part.batch
        shape = (len(part), batch["responses"].shape[1] if self.kind != "sequence_classification" else 0)
        without_padding: Any = packed_rows if self._packs else front_rows
        rows = without_padding(batch["input_ids"], batch["attention_mask"], shape[1], self.model.pad_token_id)
        if "other_log_probs" in passes.fields:
            rows = with_alternatives(rows, batch[ALTERNATIVES])
        if self._sharing is not None:
            rows = shared_rows(rows, self._sharing)
        if self._routers is not None:
            self._routers.begin(part, rows.packing.total, filler, passes.notes)
        with explain_compile_errors(self._compiled, type(self.model.hf).__name__):
            return self.model(rows.to(self.device), passes.fields, shape, passes.temperature, passes.top_k)
