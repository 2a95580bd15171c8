"""MegatronEngine: a Hugging Face model in training on Megatron-Core's layers, schedules and optimizer."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import nn

from verl.config.engine import MegatronConfig, OptimConfig
from verl.config.model import CriticModelConfig, ModelConfig, RewardModelModelConfig
from verl.models.core.architecture import CoreArchitecture
from verl.models.forward import FIELDS_OF_KIND, FIELDS_OF_ROWS
from verl.models.loading import ModelKind, empty_model, read_config, switch_dropout_off
from verl.models.packing import PackedRows, packed_rows
from verl.models.sharing import padded_rows, shared_rows
from verl.models.ulysses import SequenceParallel
from verl.protocol import DataProto
from verl.utils.device_copy import copied_together
from verl.utils.flops import SequenceCost
from verl.utils.progress import expect, tick
from verl.workers.engine.base import ALL_ROWS, Counts, LossFn, Metrics, MicroBatching
from verl.workers.engine.common import compiling, groups
from verl.workers.engine.common.frozen import checked
from verl.workers.engine.common.micro_batches import MetricSums, local_counts, micro_batches
from verl.workers.engine.common.offload import EngineMemory
from verl.workers.engine.common.optim import LossScale
from verl.workers.engine.common.routers import COLUMN as ROUTED
from verl.workers.engine.common.routers import Routers
from verl.workers.engine.common.same_model import about
from verl.workers.engine.common.saving import BackgroundSaves
from verl.workers.engine.common.step_checks import reason_against, step_metrics
from verl.workers.engine.common.stored_engine import StoredEngine
from verl.workers.engine.megatron.core_checkpoints import is_core_checkpoint, load_core_weights
from verl.workers.engine.megatron.filling import fill
from verl.workers.engine.megatron.layout import CoreLayout, Sizes
from verl.workers.engine.megatron.model import CoreModel, core_config, core_names, ddp_config
from verl.workers.engine.megatron.optimizer import CoreAdamW
from verl.workers.engine.megatron.router_replay import core_routers
from verl.workers.engine.megatron.state import CoreState
from verl.workers.engine.megatron.steps import MicroBatch, run_micro_batches
from verl.workers.engine.megatron.weights import CoreWeights

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class MegatronEngine(StoredEngine):
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
        self.device = groups.with_index(torch.device(device))
        groups.ensure_process_group(self.device)
        self.layout = layout = CoreLayout.of(Sizes.of(engine_config), self.device)
        self.dp_rank, self.dp_size = layout.dp.rank, layout.dp.size
        self._last_stage = layout.pp.rank == layout.pp.size - 1
        self.collects = self._last_stage and layout.tp.rank == 0 and layout.cp.rank == 0
        self.kind: ModelKind = kind
        self.compute_dtype = _DTYPES[engine_config.dtype or ("bf16" if self.device.type == "cuda" else "fp32")]
        self._sharing = (
            SequenceParallel(layout.cp.group, layout.cp.size, layout.cp.rank) if layout.cp.size > 1 else None
        )
        self._grad_clip = grad_clip
        self._source = "" if isinstance(model, nn.Module) else str(model)
        self._trust_remote_code = model_config.trust_remote_code
        if isinstance(model, nn.Module):
            self.hf_config: Any = copy.deepcopy(model.config)
            switch_dropout_off(self.hf_config)
        else:
            self.hf_config = read_config(self._source, self._trust_remote_code, model_config.override_config)
        self._pad_token_id = getattr(self.hf_config, "pad_token_id", None) or 0
        self._cost = SequenceCost.of_shape(self.hf_config.to_dict())
        self.arch = CoreArchitecture.of(self.hf_config)
        self._loss_scale = LossScale(self.compute_dtype)
        self._tokens = 0.0  # of all ranks since the last optimizer step
        self._compiled = compile_layers and self.device.type == "cuda"
        with layout.active():
            self._build(model_config, engine_config, optim is not None, replays)
            skeleton = empty_model(self.hf_config, kind, self.compute_dtype, self._trust_remote_code)
            named = [(part, core_names(part, layout)) for part in self.models]
            self._weights = CoreWeights(named, layout, self.arch, kind, skeleton, self.device)
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
        moments = lambda: self._optimizer.state_tensors() if self._optimizer is not None else ()  # noqa: E731
        self._memory = EngineMemory(self.device, nn.ModuleList(self.models), moments, offload_gradients=False)
        self._offloads = bool(engine_config.param_offload), bool(engine_config.optimizer_offload) and optim is not None
        self._exports = {}
        self._saves = BackgroundSaves(self.device, None, saved) if optim is not None and snapshots else None

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
            compiling.compile_layers(layer for layer in layers if not layer.is_moe_layer)
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
    ) -> MegatronEngine:
        """As a role's configuration block says."""
        config = block.megatron_config
        engine = cls(
            model,
            kind,
            model_config=model_config,
            engine_config=config,
            optim=optim,
            grad_clip=grad_clip,
            total_steps=optim.total_training_steps if optim is not None else None,
            device=device,
            compile_layers=block.use_torch_compile,
            snapshots=optim is not None and block.checkpoint.snapshot is not False,
            saved=block.checkpoint.save_contents if optim is not None else (),
            replays=replays,
        )
        if config.use_dist_checkpointing:
            engine.load(config.dist_checkpointing_path, ("model",))
        return engine

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
        """Add the gradient of this rank's rows of one optimizer step; {} before the last stage."""
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

        def use(fields: dict[str, torch.Tensor], micro_batch: MicroBatch) -> torch.Tensor:
            if micro_batch.indices is None:
                return sum((value.sum() for value in fields.values()), start=torch.zeros((), device=self.device)) * 0.0
            loss, metrics = loss_fn(fields, self._on_device(micro_batch.part), counts)
            for name, (total, count) in metrics.items():
                sums.add(name, total, count)
            return loss * self._loss_scale.value

        for chunk in self.chunks:
            chunk.train()
        with self.layout.active():
            self._optimizer.take_gradients()
            self._run(data, micro, outputs, temperature, use, backward=True)
            measured = self._routers.measured() if self._routers is not None else {}
        for name, value in measured.items() if self._last_stage else ():
            sums.add(name, value, 1.0)
        return sums.result()

    def optimizer_step(self) -> dict[str, float]:
        """Clip, step, advance the schedule, zero the gradients; or, on all ranks, only the last (see `step_checks`)."""
        if self._optimizer is None:
            raise ValueError("optim: this engine was built without an optimizer (frozen); it cannot step.")
        self._memory.before_change()
        with self.layout.active():
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
            with self.layout.active():
                if not math.isfinite(self._optimizer.weight_norm()):
                    return False
        if not thorough:
            return True
        ids = torch.arange(1, 9)[None] % self.arch.vocab
        tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "responses": ids[:, 4:]}
        with compiling.eager(self._compiled):
            found = self._inferred(DataProto.from_dict(tokens), FIELDS_OF_KIND[self.kind][:1], 1.0, ALL_ROWS)
        finite = all(bool(value.isfinite().all()) for value in found.values())
        return groups.largest(int(not finite), self.device) == 0

    def infer(
        self, data: DataProto, outputs: Sequence[str], temperature: float = 1.0, micro: MicroBatching = ALL_ROWS
    ) -> DataProto:
        """The fields [B, R] (`FIELDS_OF_ROWS`: [B]), float32 on the CPU, in the order of the rows; none before the last
        stage."""
        keys = ["input_ids", "attention_mask"] + (["responses"] if self.kind != "sequence_classification" else [])
        keys += [ROUTED] if ROUTED in data.batch.keys() else []
        inputs = data.select(batch_keys=keys, non_tensor_batch_keys=[], meta_info_keys=[])
        expect(len(data))
        found = self._inferred(inputs, outputs, temperature, micro)
        return DataProto.from_dict(found) if found else DataProto()

    @torch.no_grad()
    def _inferred(
        self, data: DataProto, outputs: Sequence[str], temperature: float, micro: MicroBatching
    ) -> dict[str, torch.Tensor]:
        order: list[int] = []
        fields = [name for name in outputs if name != ROUTED]
        parts: dict[str, list[torch.Tensor]] = {name: [] for name in fields}

        def use(fields: dict[str, torch.Tensor], micro_batch: MicroBatch) -> torch.Tensor:
            if micro_batch.indices is not None:
                order.extend(micro_batch.indices)
                for name, value in fields.items():
                    parts[name].append(value)
            return torch.zeros((), device=self.device)

        for chunk in self.chunks:
            chunk.eval()
        with self.layout.active():
            done = self._run(data, micro, fields, temperature, use, backward=False, notes=ROUTED in outputs)
            found = {ROUTED: self._noted(data, done)} if ROUTED in outputs else {}
        if not self._last_stage:
            return {}
        for name, values in parts.items():
            per_row = name in FIELDS_OF_ROWS
            found[name] = torch.zeros(len(data) if per_row else (len(data), data.batch["responses"].shape[1]))
            if order:
                found[name][order] = torch.cat(values).cpu()  # the first time that the host waits for the device
        return found

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

    def _run(
        self,
        data: DataProto,
        micro: MicroBatching,
        outputs: Sequence[str],
        temperature: float,
        use: Any,
        backward: bool,
        notes: bool = False,
    ) -> list[MicroBatch]:
        """What it ran; `notes`: with the experts that tokens went through."""
        unknown = set(outputs) - set(FIELDS_OF_KIND[self.kind])
        if unknown or not outputs:
            raise ValueError(
                f"outputs: {sorted(outputs)} of a {self.kind} model; it gives {', '.join(FIELDS_OF_KIND[self.kind])}."
            )
        if temperature <= 0:
            raise ValueError(f"temperature: {temperature} is not above 0; log-probabilities need one that is.")
        parts = self._micro_batches(data, micro, notes)
        with compiling.running_compiled(self._compiled, self.arch.family):
            run_micro_batches(
                self.chunks,
                self.layout,
                parts,
                tuple(outputs),
                temperature,
                use,
                backward=backward,
                done=lambda micro_batch: tick(len(micro_batch.indices or ())),
            )
        return parts

    def _noted(self, data: DataProto, done: Sequence[MicroBatch]) -> torch.Tensor:
        """[B, P+R, layers, k]: the experts of every token. A collective."""
        if self._routers is None:
            raise ValueError(f"outputs: {ROUTED} of a {self.arch.family} model, which has no experts.")
        return self._routers.noted(data, ((part.indices, part.routes) for part in done if part.routes is not None))

    def _micro_batches(self, data: DataProto, micro: MicroBatching, notes: bool) -> list[MicroBatch]:
        """As many on every rank. Chunks of stages that take turns want a multiple of the stages, all of one length:
        each knows what the next message holds."""
        in_turn, stages = self.layout.vpp > 1, self.layout.pp.size

        def wanted(count: int) -> int:
            most = groups.largest(count, self.device)
            return math.ceil(most / stages) * stages if in_turn else most

        parts = list(micro_batches(data, micro.shared_by(self.layout.cp.size), self._cost, wanted))
        width = data.batch["responses"].shape[1] if self.kind != "sequence_classification" else 0
        packed = [
            packed_rows(part.batch["input_ids"], part.batch["attention_mask"], width, self._pad_token_id)
            for part, _ in parts
        ]
        longest = max((rows.packing.total for rows in packed), default=0) if in_turn else 0
        return [
            self._micro_batch(part, indices, self._placed(rows, longest), (len(part), width), notes)
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

    def _on_device(self, part: DataProto) -> DataProto:
        tensors = {name: value for name, value in part.batch.items() if name != ROUTED}  # routers have been told
        moved = zip(tensors, copied_together(list(tensors.values()), self.device), strict=True)
        return DataProto.from_dict(dict(moved), part.non_tensor_batch, part.meta_info)
