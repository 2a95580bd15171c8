"""FSDPEngine: a Hugging Face model in training, sharded over ranks by torch's `fully_shard`."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from verl.config.engine import FSDPConfig, OptimConfig
from verl.config.model import CriticModelConfig, ModelConfig, RewardModelModelConfig
from verl.models.forward import FIELDS_OF_KIND, FIELDS_OF_ROWS, ResponseModel, front_rows
from verl.models.loading import ModelKind, empty_model, pretrained_model, read_config, switch_dropout_off
from verl.models.lora import Adapters
from verl.models.packing import packed_rows
from verl.models.sharing import shared_rows
from verl.models.trials import check_head, runs_packed
from verl.models.ulysses import check_heads
from verl.protocol import DataProto
from verl.utils.device_copy import copied_together
from verl.utils.flops import SequenceCost
from verl.utils.progress import expect, tick
from verl.workers.engine.base import ALL_ROWS, Counts, LossFn, Metrics, MicroBatching
from verl.workers.engine.common import compiling, groups
from verl.workers.engine.common.micro_batches import MetricSums, local_counts, micro_batches, with_last
from verl.workers.engine.common.offload import EngineMemory
from verl.workers.engine.common.optim import LossScale, build_schedule
from verl.workers.engine.common.routers import COLUMN as ROUTED
from verl.workers.engine.common.routers import Routes
from verl.workers.engine.common.same_model import about
from verl.workers.engine.common.saving import BackgroundSaves
from verl.workers.engine.common.step_checks import reason_against, step_metrics
from verl.workers.engine.common.stored_engine import StoredEngine
from verl.workers.engine.fsdp import sharding
from verl.workers.engine.fsdp.model_weights import ModelWeights
from verl.workers.engine.fsdp.optimizer import ShardedAdamW
from verl.workers.engine.fsdp.router_replay import HFRouters
from verl.workers.engine.fsdp.state import EngineState


class FSDPEngine(StoredEngine):
    """See `verl.workers.engine.base.TrainEngine`. Weights are sharded over all ranks of the process group; groups of
    `sequence_parallel_size` neighbours get the same rows and share their tokens.

    Master weights, gradients and moments are float32 shards; matrices are multiplied in `mixed_precision`. Without
    `optim` the model is frozen (a reference, a reward model) and kept in the compute dtype; so is, with
    `model_config.lora_rank`, everything but the adapters (and a value head).
    """

    _weights: ModelWeights

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
        self.device = groups.with_index(torch.device(device))
        groups.ensure_process_group(self.device)
        self._sharing = sharding.sequence_parallel(self.device, sequence_parallel_size)
        self.dp_rank = dist.get_rank() // sequence_parallel_size
        self.dp_size = dist.get_world_size() // sequence_parallel_size
        self.collects = self._sharing is None or self._sharing.rank == 0
        self.kind: ModelKind = kind
        self.compute_dtype = sharding.compute_dtype(engine_config, self.device)
        self.mesh = sharding.build_mesh(self.device, engine_config.fsdp_size)
        self._grad_clip = grad_clip
        self._source = "" if isinstance(model, nn.Module) else str(model)
        self._trust_remote_code = model_config.trust_remote_code
        if isinstance(model, nn.Module):
            self.hf_config: Any = copy.deepcopy(model.config)
            switch_dropout_off(self.hf_config)
        else:
            self.hf_config = read_config(self._source, self._trust_remote_code, model_config.override_config)
        self._cost = SequenceCost.of_shape(self.hf_config.to_dict())
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
            compiling.compile_layers(sharding.outermost_layers(self.model.hf))
        self._optimizer: ShardedAdamW | None = None
        moments = lambda: self._optimizer.state_tensors() if self._optimizer is not None else ()  # noqa: E731
        self._memory = EngineMemory(self.device, self.model, moments, bool(engine_config.grad_offload))
        self._offloads = bool(engine_config.param_offload), bool(engine_config.optimizer_offload) and optim is not None
        self._schedule: LambdaLR | None = None
        self._loss_scale = LossScale(self.compute_dtype)
        self._tokens = 0.0  # of all ranks since the last optimizer step
        if optim is not None:
            learning = {name: value for name, value in self.model.hf.named_parameters() if value.requires_grad}
            self._optimizer = ShardedAdamW(learning, optim, self.mesh)
            self._schedule = build_schedule(self._optimizer.adamw, optim, total_steps)
        self._state = EngineState(
            self.model.hf,
            about(self.hf_config, kind, None if self._adapters is None else self._adapters.about()),
            self._weights,
            self._optimizer,
            self._schedule,
            self._loss_scale,
            self.device,
            self._source,
        )
        self._exports = {}
        self._saves = BackgroundSaves(self.device, self.mesh, saved) if optim is not None and snapshots else None

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
    ) -> FSDPEngine:
        """As a role's configuration block says."""
        return cls(
            model,
            kind,
            model_config=model_config,
            engine_config=block.fsdp_config,
            optim=optim,
            grad_clip=grad_clip,
            total_steps=optim.total_training_steps if optim is not None else None,
            device=device,
            sequence_parallel_size=block.ulysses_sequence_parallel_size,
            compile_layers=block.use_torch_compile,
            snapshots=optim is not None and block.checkpoint.snapshot is not False,
            saved=block.checkpoint.save_contents if optim is not None else (),
            replays=replays,
        )

    # ---------------------------------------------------------------- training

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
        if self._saves is not None:
            self._saves.make_room(self._state)
        if counts is None:
            mine = local_counts(data) if self.collects else Counts(0.0, 0.0)
            tokens, sequences = groups.summed([mine.tokens, mine.sequences], self.device)
            counts = Counts(tokens, sequences)
        self._tokens += counts.tokens
        sums = MetricSums()
        self.model.train()
        for (part, rows), last in with_last(self._micro_batches(data, micro)):
            if self._one_group and not self._memory.offloads_gradients:
                sharding.finish_with(self.model, last)
            self._memory.before_micro_batch()
            fields = self._forward(part, outputs, temperature, filler=rows is None)
            if rows is None:
                loss = sum((value.sum() for value in fields.values()), start=torch.zeros((), device=self.device)) * 0.0
            else:
                loss, metrics = loss_fn(fields, self._on_device(part), counts)
                for name, (total, count) in metrics.items():
                    sums.add(name, total, count)
            (loss * self._loss_scale.value).backward()
            tick(len(rows or ()))
        for name, value in self._routers.measured().items() if self._routers is not None else ():
            sums.add(name, value, 1.0)
        return sums.result()

    def optimizer_step(self) -> dict[str, float]:
        """Clip, step, advance the schedule, zero the gradients; or, on all ranks, only the last (see `step_checks`)."""
        if self._optimizer is None or self._schedule is None:
            raise ValueError("optim: this engine was built without an optimizer (frozen); it cannot step.")
        self._memory.before_change()
        if not self._optimizer.gradients():
            raise RuntimeError("optimizer_step: there are no gradients; call forward_backward first.")
        lr = self._schedule.get_last_lr()[0]
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
            self._schedule.step()
        if tokens:
            self._loss_scale.update(math.isfinite(grad_norm))
        self._optimizer.zero_grad()
        return step_metrics(grad_norm, lr, reason)

    def sound(self, thorough: bool) -> bool:
        """Whether the weights are finite; `thorough`: and what they give for a few tokens, too. Alike on all ranks."""
        if self._optimizer is not None and not math.isfinite(self._optimizer.weight_norm()):
            return False
        if not thorough:
            return True
        ids = torch.arange(1, 9)[None] % self.hf_config.get_text_config().vocab_size
        tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "responses": ids[:, 4:]}
        with self._inference(), compiling.eager(self._compiled):
            fields = self._forward(DataProto.from_dict(tokens), FIELDS_OF_KIND[self.kind][:1], temperature=1.0)
        finite = all(bool(value.isfinite().all()) for value in fields.values())
        return groups.largest(int(not finite), self.device) == 0

    def infer(
        self, data: DataProto, outputs: Sequence[str], temperature: float = 1.0, micro: MicroBatching = ALL_ROWS
    ) -> DataProto:
        """The fields [B, R] (`FIELDS_OF_ROWS`: [B]) without gradient, float32 on the CPU, in the order of the rows."""
        keys = ["input_ids", "attention_mask"] + (["responses"] if self.kind != "sequence_classification" else [])
        keys += [ROUTED] if ROUTED in data.batch.keys() else []
        inputs = data.select(batch_keys=keys, non_tensor_batch_keys=[], meta_info_keys=[])
        order: list[int] = []
        fields = [name for name in outputs if name != ROUTED]
        noting = self._routers if ROUTED in outputs else None
        if ROUTED in outputs and noting is None:
            raise ValueError(f"outputs: {ROUTED} of {type(self.model.hf).__name__}, which has no experts.")
        parts: dict[str, list[torch.Tensor]] = {name: [] for name in fields}
        routes: list[tuple[list[int] | None, Routes]] = []
        expect(len(data))
        with self._inference():
            for part, rows in self._micro_batches(inputs, micro):
                values = self._forward(part, fields, temperature, filler=rows is None, notes=noting is not None)
                if noting is not None:
                    routes.append((rows, noting.current))
                if rows is not None:
                    order += rows
                    for name, value in values.items():
                        parts[name].append(value)
                    tick(len(rows))
        found = {} if noting is None else {ROUTED: noting.noted(inputs, routes)}
        for name, found_parts in parts.items():
            per_row = name in FIELDS_OF_ROWS
            found[name] = torch.zeros(len(data) if per_row else (len(data), inputs.batch["responses"].shape[1]))
            if order:
                found[name][order] = torch.cat(found_parts).cpu()  # the first time that the host waits for the device
        return DataProto.from_dict(found)

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
            source = pretrained_model(self._source, self.hf_config, self.kind, self._trust_remote_code)
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

    def _micro_batches(self, data: DataProto, micro: MicroBatching) -> Iterator[tuple[DataProto, list[int] | None]]:
        """Each micro-batch with its row indices; None for a filler that keeps step with other ranks."""
        shared = micro.shared_by(self._sharing.size if self._sharing else 1)
        return micro_batches(data, shared, self._cost, lambda count: groups.largest(count, self.device))

    def _forward(
        self, part: DataProto, outputs: Sequence[str], temperature: float, filler: bool = False, notes: bool = False
    ) -> dict[str, torch.Tensor]:
        """The fields of one micro-batch, which stays where it is; `notes`: routers keep which experts they chose."""
        unknown = set(outputs) - set(FIELDS_OF_KIND[self.kind])
        if unknown or not outputs:
            raise ValueError(
                f"outputs: {sorted(outputs)} of a {self.kind} model; it gives {', '.join(FIELDS_OF_KIND[self.kind])}."
            )
        if temperature <= 0:
            raise ValueError(f"temperature: {temperature} is not above 0; log-probabilities need one that is.")
        batch = part.batch
        shape = (len(part), batch["responses"].shape[1] if self.kind != "sequence_classification" else 0)
        without_padding: Any = packed_rows if self._packs else front_rows
        rows = without_padding(batch["input_ids"], batch["attention_mask"], shape[1], self.model.pad_token_id)
        if self._sharing is not None:
            rows = shared_rows(rows, self._sharing)
        if self._routers is not None:
            self._routers.begin(part, rows.packing.total, filler, notes)
        with compiling.running_compiled(self._compiled, type(self.model.hf).__name__):
            return self.model(rows.to(self.device), tuple(outputs), shape, temperature)

    def _on_device(self, part: DataProto) -> DataProto:
        tensors = {name: value for name, value in part.batch.items() if name != ROUTED}  # routers have been told
        moved = zip(tensors, copied_together(list(tensors.values()), self.device), strict=True)
        return DataProto.from_dict(dict(moved), part.non_tensor_batch, part.meta_info)
