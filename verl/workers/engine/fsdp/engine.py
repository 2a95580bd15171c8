"""FSDPEngine: a Hugging Face model sharded over ranks by torch's `fully_shard`.

FSDPState: its state in a checkpoint, written in shards and read on any number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from verl.config.engine import CriticModelConfig, FSDPConfig, ModelConfig, OptimConfig, RewardModelModelConfig
from verl.models.forward import ResponseModel, check_head, enable_packed_attention
from verl.models.loading import ModelKind, empty_model, outermost_layers, pretrained_model, read_config
from verl.models.lora import ADAPTER_FOLDER, Adapters
from verl.models.packing import Packing, packed_rows, right_padded_rows, sequence_parallel_rows, with_alternatives
from verl.models.prefix_support import precision_obstacle, sharing_obstacle
from verl.models.routing import expert_weights, routers
from verl.models.ulysses import SequenceParallel, check_heads
from verl.protocol import DataProto
from verl.utils.checkpoint.manifest import ChecksumRecorder
from verl.utils.progress import tick
from verl.workers.engine.base import Metrics, UnmergedSource
from verl.workers.engine.common import groups
from verl.workers.engine.common.base_engine import (
    TEACHER_TOP_IDS,
    BaseTrainEngine,
    ModelPass,
    compile_each_layer,
    compiled_pass,
    keep_head_size_constant,
)
from verl.workers.engine.common.checkpoint_compatibility import ModelDescription, model_info, require_fit
from verl.workers.engine.common.engine_checkpoint import StateSnapshot, extra_state, restore_extra
from verl.workers.engine.common.hf_export import HFExport
from verl.workers.engine.common.micro_batches import micro_batches, with_last
from verl.workers.engine.common.offload import local_shard
from verl.workers.engine.common.optim import LossScale, restore_schedule
from verl.workers.engine.common.prefix_sharing import PrefixSharing, supported_mode
from verl.workers.engine.common.routers import LayerRouter, MoEShape, Routers, Routes, TokenShare
from verl.workers.engine.common.sharded_checkpoint import load_tensors, save_tensors, stored_tensors
from verl.workers.engine.fsdp import sharding
from verl.workers.engine.fsdp.optimizer import ShardedAdamW
from verl.workers.engine.fsdp.weights import ModelWeights, UnmergedWeights


class FSDPEngine(BaseTrainEngine):
    """Implements `verl.workers.engine.base.TrainEngine`.

    Weights are sharded over all ranks of the process group. Groups of `sequence_parallel_size` neighbouring ranks
    receive the same rows and split their tokens (Ulysses).

    Master weights, gradients and moments are float32 shards; the forward pass runs in `mixed_precision`. Without
    `optim` the model is frozen (a reference, a reward model) and stored in the compute dtype. With
    `model_config.lora_rank`, only the adapters (and a value head) are trained; the other weights are frozen.
    """

    _weights: ModelWeights
    _routers: HFRouters | None
    _has_outputs = True
    _supports_grad_offload = True

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
        background_save: bool = True,
        save_contents: Collection[str] = (),
        router_replay: bool = False,
        prefix_sharing: str = "false",
    ) -> None:
        """`model` is a local folder, a hub name, or a model of that kind in memory (a ValueModel for `value`).

        - `compile_layers` has an effect on packed tokens on CUDA only.
        - `background_save`: checkpoints are copied to host memory and written during training. Memory for
          `save_contents`, the contents of future checkpoints, is allocated during the first update.
        - `router_replay`: routers of a mixture-of-experts model use the experts in the column `routed_experts`.
        - `prefix_sharing`: true, false or auto; compute common prefixes of rows once, with auto if that saves enough.
        """
        self._init_common(model, kind, model_config, engine_config.mixed_precision, device, grad_clip)
        self.sequence_parallel = sharding.sequence_parallel(self.device, sequence_parallel_size)
        self.dp_rank = dist.get_rank() // sequence_parallel_size
        self.dp_size = dist.get_world_size() // sequence_parallel_size
        self.collects = self.sequence_parallel is None or self.sequence_parallel.rank == 0
        self.mesh = sharding.build_mesh(self.device, engine_config.fsdp_size)
        if self.sequence_parallel is not None:
            check_heads(self.hf_config, self.sequence_parallel.size)
        if self.device.type == "cuda":
            obstacle = precision_obstacle(engine_config.mixed_precision)
            obstacle = obstacle or sharing_obstacle(self.hf_config.get_text_config())
            prefix_sharing = supported_mode(prefix_sharing, obstacle)
        self._build_model(model, model_config, engine_config, frozen=optim is None)
        compile_layers = compile_layers and self.device.type == "cuda"
        # Measuring expert load is cheap, but its hooks would cause graph breaks in compiled layers.
        measure = optim is not None and not compile_layers
        self._routers = HFRouters.create(self.model.hf, self.sequence_parallel, self.device, router_replay, measure)
        with self._inference():
            check_head(self.model, self.device)
            self._packs = model_config.use_remove_padding and enable_packed_attention(self.model, self.device)
        if optim is not None and self.mesh.size() == 1 and not self._one_group:
            sharding.accumulate_in_place(self.model)
        if not self._packs:
            self._reject_features_that_need_packing(router_replay, prefix_sharing)
            self._routers = None
        replays = self._routers is not None and self._routers.replay
        mode, expands_rows = prefix_sharing if self._packs else "false", self.device.type != "cuda"
        self.compiled = compile_layers and self._packs
        self.prefix_sharing = PrefixSharing(mode, self.cost, expands_rows, replays, self.compiled)
        if optim is not None and getattr(model_config, "enable_gradient_checkpointing", False):
            sharding.checkpoint_activations(self.model)
        if self.compiled:
            self.compile_layers()
        self.optimizer: ShardedAdamW | None = None
        if optim is not None:
            trained = {name: value for name, value in self.model.hf.named_parameters() if value.requires_grad}
            self.optimizer = ShardedAdamW(trained, optim, self.mesh, total_steps)
        self._state = FSDPState(
            self.model.hf,
            model_info(self.hf_config, kind, None if self.adapters is None else self.adapters.settings()),
            self._weights,
            self.optimizer,
            self._loss_scale,
            self.device,
            self._source,
        )
        self._init_storage(self.model, engine_config, self.mesh, background_save, save_contents)

    def _reject_features_that_need_packing(self, router_replay: bool, prefix_sharing: str) -> None:
        """Raise ValueError if a requested feature requires packed tokens, which this model does not use."""
        requirements = {
            "ulysses_sequence_parallel_size": (self.sequence_parallel is not None, "1"),
            "router_replay.mode": (router_replay, "disabled"),
            "use_prefix_grouper": (prefix_sharing == "true", "False"),
        }
        for key, (required, off) in requirements.items():
            if required:
                raise ValueError(
                    f"{key}: requires packed tokens, but this model runs with padding. Set it to {off}; or, if "
                    "model.use_remove_padding is False, set that to True."
                )

    @classmethod
    def _backend_arguments(cls, block: Any) -> dict[str, Any]:
        return {
            "engine_config": block.fsdp_config,
            "sequence_parallel_size": block.ulysses_sequence_parallel_size,
            "prefix_sharing": block.use_prefix_grouper,
        }

    # ---------------------------------------------------------------- forward and backward

    def _run_training(self, run: ModelPass) -> None:
        self.model.train()
        for (part, rows), last in with_last(self._micro_batches(run)):
            if self._one_group and not self.memory.offloads_gradients:
                sharding.set_last_micro_batch(self.model, last)
            self.memory.before_micro_batch()
            run.on_outputs(self._forward(part, run, filler=rows is None), part, rows).backward()
            tick(len(rows or ()))

    def _pass_metrics(self) -> Metrics:
        return self.prefix_sharing.metrics()

    def _run_inference(self, run: ModelPass) -> list[tuple[list[int] | None, Routes]]:
        recorded = []
        with self._inference():
            for part, rows in self._micro_batches(run):
                run.on_outputs(self._forward(part, run, filler=rows is None), part, rows)
                if run.record_routing and self._routers is not None and self._routers.active is not None:
                    recorded.append((rows, self._routers.active))
                tick(len(rows or ()))
        return recorded

    def base_weights(self) -> AbstractContextManager[None]:
        """See `TrainEngine.base_weights`."""
        return self.adapters.disabled() if self.adapters is not None else nullcontext()

    def unmerged(self) -> UnmergedSource | None:
        """See `TrainEngine.unmerged`."""
        if self.adapters is None:
            return None
        on_device = partial(self.to, "device", optimizer=False)
        return UnmergedWeights(self.model.hf, self.adapters, self.device, on_device)

    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        """See `TrainEngine.to`; gradients move with the model."""
        if device == "cpu":
            self._reshard()
        super().to(device, model, optimizer)

    # ---------------------------------------------------------------- internals

    def _build_model(
        self, model: str | os.PathLike | nn.Module, model_config: Any, engine_config: FSDPConfig, frozen: bool
    ) -> None:
        """Build the model on the meta device, shard it, and load the weights that each node's leader reads."""
        adapted = not frozen and not isinstance(model_config, RewardModelModelConfig) and model_config.lora_rank > 0
        master = self.compute_dtype if frozen or adapted else torch.float32
        node = groups.node_group()
        source: nn.Module | None = None
        if node.is_leader and isinstance(model, nn.Module):
            source = model
        elif node.is_leader:
            source = pretrained_model(
                self._source, self.hf_config, self.kind, self._trust_remote_code, trains=not frozen
            )
        hf = empty_model(self.hf_config, self.kind, master, self._trust_remote_code)
        self.model = ResponseModel(hf, self.kind)
        self.model.requires_grad_(not frozen)
        self.adapters = Adapters(hf, self.kind, model_config) if adapted else None
        self._weights = ModelWeights(hf, self.adapters, self.device)
        reshard, prefetch = engine_config.reshard_after_forward, bool(engine_config.forward_prefetch)
        self._one_group = sharding.shard(self.model, self.mesh, self.compute_dtype, reshard, prefetch)
        sharding.load_weights(self.model.hf, source, node, self.device, self.adapters)

    def compile_layers(self) -> None:
        if self.adapters is not None:
            # With frozen embeddings, the first layer's input requires no gradient: the layer would be compiled again,
            # for a backward pass without that gradient.
            sharding.require_input_gradients(self.model)
        keep_head_size_constant(self.model.hf)
        compile_each_layer(outermost_layers(self.model.hf))

    @contextmanager
    def _inference(self) -> Iterator[None]:
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            # Weights that stay gathered would be stale after the next optimizer step.
            self._reshard()

    def _reshard(self) -> None:
        for module in sharding.sharded_modules(self.model):
            module.reshard()

    def _micro_batches(self, run: ModelPass) -> Iterator[tuple[DataProto, list[int] | None]]:
        """Yield each micro-batch with its row indices, which are None for a filler."""
        micro = run.micro.scaled_by(self.sequence_parallel.size if self.sequence_parallel else 1)
        tree = self.prefix_sharing.begin(run.data)
        return micro_batches(run.data, micro, self.cost, lambda count: groups.max_over_ranks(count, self.device), tree)

    def _forward(self, part: DataProto, run: ModelPass, filler: bool) -> dict[str, torch.Tensor]:
        """Return the fields of one micro-batch, on the device."""
        batch = part.batch
        shape = (len(part), batch["responses"].shape[1] if self.kind != "sequence_classification" else 0)
        to_rows: Any = packed_rows if self._packs else right_padded_rows
        rows = to_rows(batch["input_ids"], batch["attention_mask"], shape[1], self.model.pad_token_id)
        if self._packs:
            rows = self.prefix_sharing.apply(rows, part, filler)
        if "other_log_probs" in run.fields:
            rows = with_alternatives(rows, batch[TEACHER_TOP_IDS])
        if self.sequence_parallel is not None:
            rows = sequence_parallel_rows(rows, self.sequence_parallel)
        if self._routers is not None:
            self._routers.begin(part, rows.packing, filler, run.record_routing)
        with compiled_pass(self.compiled, type(self.model.hf).__name__):
            return self.model(rows.to(self.device), run.fields, shape, run.temperature, run.top_k)


# ---------------------------------------------------------------- router replay


# Relative to the largest weight; rounding to half precision alone causes a part of it.
_MAX_WEIGHT_ERROR = 0.02


class HFRouters(Routers):
    """The routers of all layers. The latest routes also apply to activations recomputed in the backward pass, because
    each micro-batch runs backward before the next one runs forward."""

    def __init__(self, hf: nn.Module, parallel: SequenceParallel | None, device: torch.device, replay: bool) -> None:
        by_layer = routers(hf)
        first = next(iter(by_layer.values()))
        layers = range(hf.config.get_text_config().num_hidden_layers)
        shape = MoEShape(first.num_experts, first.top_k, tuple(layer in by_layer for layer in layers))
        share = TokenShare() if parallel is None else TokenShare(parallel.size, parallel.rank, groups=(parallel.group,))
        hooks = [_HFRouter(layer, router, self, device.type == "cuda") for layer, router in by_layer.items()]
        super().__init__(hooks, shape, share, device, replay)
        self.active: Routes | None = None
        """Routes of the latest pass; None before the first (only passes that test the model have run)."""

    @staticmethod
    def create(
        hf: nn.Module, parallel: SequenceParallel | None, device: torch.device, replay: bool, measure: bool
    ) -> HFRouters | None:
        """Return None if the model has no routers, or if they are neither replayed nor measured."""
        if routers(hf):
            return HFRouters(hf, parallel, device, replay) if replay or measure else None
        if replay:
            raise ValueError(f"router_replay.mode: {type(hf).__name__} has no routers to replay. Set it to disabled.")
        return None

    def begin(self, part: DataProto, packing: Packing, filler: bool, record: bool) -> None:
        """Activate the routes of a micro-batch, before its pass."""
        self.active = self.routes(part, packing, filler, record)


class _HFRouter(LayerRouter):
    """Forward hook of a router that replaces the selected experts."""

    def __init__(self, layer: int, router: Any, routers: HFRouters, on_cuda: bool) -> None:
        super().__init__(layer, router.num_experts)
        self._routers = routers
        # The hook differs from pass to pass and would be recompiled for each. (Nothing is compiled on a CPU, where
        # importing the compiler takes a second.)
        router.register_forward_hook(torch.compiler.disable(self._hook) if on_cuda else self._hook)

    def _hook(self, router: Any, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> Any:
        """`outputs` are logits, weights and experts [tokens, k]; returning None keeps them."""
        weights, own = outputs[-2:]
        routes = self._routers.active
        if routes is None:
            if self._routers.replay:
                _check_expert_weights(router, inputs[0], weights, own)
            return None
        selected = self.select(routes, own)
        if selected is own:
            return None
        return *outputs[:-2], expert_weights(router, inputs[0], selected).to(weights.dtype), selected


def _check_expert_weights(router: Any, hidden: torch.Tensor, weights: torch.Tensor, own: torch.Tensor) -> None:
    """Raise ValueError if the router weights experts differently from `expert_weights`."""
    supported = isinstance(getattr(router, "weight", None), torch.Tensor)
    error = (expert_weights(router, hidden, own) - weights).abs().max() / weights.abs().max() if supported else 1.0
    if error > _MAX_WEIGHT_ERROR:
        raise ValueError(
            f"router_replay.mode: {type(router).__name__} weights experts in an unsupported way. Set it to disabled, or"
            " add the model family to verl.models.routing."
        )


# ---------------------------------------------------------------- state in a checkpoint


@dataclass(frozen=True)
class FSDPState:
    """Implements `CheckpointState` for an FSDPEngine."""

    hf: nn.Module
    model_info: Mapping[str, Any]
    """Contents of `model.json`."""
    weights: ModelWeights
    optimizer: ShardedAdamW | None
    loss_scale: LossScale
    device: torch.device
    source: str
    """Folder or hub name of the original model."""

    def snapshot(self, contents: Collection[str]) -> StateSnapshot:
        """Return the live tensors and a copy of all small state. A collective."""
        weights = self._weights_for(contents)
        moments = self.optimizer.tensors() if "optimizer" in contents and self.optimizer is not None else {}
        extra: dict[str, Any] = {}
        if "extra" in contents:
            step = self.optimizer.schedule.last_epoch if self.optimizer is not None else 0
            extra = extra_state(step, self.loss_scale, self.device)
        return StateSnapshot(contents, weights, moments, extra, self._description().model_info)

    def sizes(self, contents: Collection[str]) -> list[int]:
        """See `CheckpointState.sizes`."""
        weights = [local_shard(value).nbytes for value in self._weights_for(contents).values()]
        return weights + (self.optimizer.sizes() if "optimizer" in contents and self.optimizer is not None else [])

    def _weights_for(self, contents: Collection[str]) -> Mapping[str, torch.Tensor]:
        if "hf_model" in contents:
            return self.weights.local_tensors()
        return self.weights.stored() if "model" in contents else {}

    def write(
        self, snapshot: StateSnapshot, folder: Path, export: HFExport | None, group: dist.ProcessGroup | None
    ) -> None:
        """See `CheckpointState.write`."""
        contents = snapshot.contents
        with groups.raise_on_all_ranks(group), ChecksumRecorder(folder) as recorder:
            if "model" in contents:
                trained = self.weights.trained(snapshot.weights)
                save_tensors(trained, folder / "model", recorder, group)
                self.weights.write_adapter(trained, folder / ADAPTER_FOLDER, self.source, group)
            if "optimizer" in contents and self.optimizer is not None:
                save_tensors(snapshot.moments, folder / "optimizer", recorder, group)
            # Rank 0 writes its own files after the last collective: if that fails, no other rank waits in a collective.
            if dist.get_rank() == 0:
                snapshot.write_unsharded(recorder)
        if export is not None:
            gather = self.weights.gather_on_rank0(snapshot.weights, export.dtype, group)
            export.write(gather, folder / "huggingface", group)

    def check_fits(self, folder: Path, contents: Collection[str]) -> None:
        """See `CheckpointState.check_fits`."""
        require_fit(folder, contents, self._description())

    def load(self, folder: Path, contents: Collection[str]) -> None:
        """See `CheckpointState.load`."""
        if "model" in contents:
            load_tensors(self.weights.stored(), folder / "model")
        if "optimizer" in contents and self.optimizer is not None:
            stored = set(stored_tensors(folder / "optimizer"))
            load_tensors(self.optimizer.allocate_state(stored), folder / "optimizer")
        if "extra" in contents:
            step = restore_extra(folder, self.loss_scale, self.device)
            if self.optimizer is not None:
                restore_schedule(self.optimizer.schedule, self.optimizer.adamw, step)

    def _description(self) -> ModelDescription:
        return ModelDescription.from_model(self.hf, self.weights.stored(), self.model_info)


def expected_model(path: str, kind: ModelKind, model_config: Any) -> ModelDescription:
    """Describe the model at the local `path` as a training FSDPEngine would have it, without loading weights."""
    config = read_config(path, model_config.trust_remote_code, model_config.override_config)
    hf = empty_model(config, kind, torch.float32, model_config.trust_remote_code)
    adapters = Adapters(hf, kind, model_config) if model_config.lora_rank > 0 else None
    stored = ModelWeights(hf, adapters, torch.device("meta")).stored()
    return ModelDescription.from_model(
        hf, stored, model_info(config, kind, None if adapters is None else adapters.settings())
    )
