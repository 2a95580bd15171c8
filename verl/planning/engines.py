"""Device memory of rollout engines and of the reward model server, by phase.

The native engine is the sum of its parts; third-party engines take a configured share of the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from verl.config import names
from verl.config.layout import (
    async_settings,
    frees_partial_kv,
    layout_of,
    reward_server_shares_devices,
    runs_in_own_process,
    serves_reward_model,
    shares_devices,
)
from verl.config.ppo import PPOConfig
from verl.config.rollout import GeneratorConfig, NativeOptions, RolloutConfig
from verl.planning.fsdp import FSDPModelMemory
from verl.planning.phases import GB, DeviceMemory
from verl.planning.shapes import ModelShape
from verl.utils.buffer_sizes import (
    bytes_per_token,
    device_kv_bytes,
    graph_bytes,
    host_kv_bytes,
    logit_bytes,
    step_bytes,
)

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "bfloat16": 2, "float16": 2, "float32": 4}
# Memory that a further process needs on a GPU: driver context, workspaces of libraries, cache of torch's allocator.
_PROCESS_BYTES = int(1.0 * GB)
# Memory of LoRA adapters in the native engine relative to their size: matrices of fused layers are padded with zeros.
_ADAPTER_PADDING = 2
# Phases with the engine's weights on the device. Responses are scored while others are still generated.
_PHASES_WITH_WEIGHTS = ("gen", "reward", "judge")


def responses_per_batch(config: PPOConfig) -> int:
    """Number of responses of one generation batch."""
    return config.data.gen_batch_size * config.actor_rollout_ref.rollout.n


def rollout_bytes(
    config: PPOConfig, shape: ModelShape, phase: str, device: DeviceMemory | None, resident: float
) -> float:
    """Return the bytes of the rollout engine on one device in `phase`.

    `resident`: bytes of the device that are in use when the engine sizes its KV cache.
    """
    rollout, on_gpu = config.actor_rollout_ref.rollout, config.trainer.device == "cuda"
    if rollout.server_urls:
        return 0.0
    overlaps_training = config.trainer.mode != "sync" and shares_devices(config)
    batches = 1 + async_settings(config.trainer).max_staleness if overlaps_training else 1
    responses = math.ceil(batches * responses_per_batch(config) / layout_of(config, "rollout").dp_size)
    parts = engine_footprint(rollout, shape, min(rollout.max_num_seqs, responses), on_gpu, device, resident)
    weights = parts.weights if phase in _PHASES_WITH_WEIGHTS or not rollout.free_weights else 0.0
    if names.rollout_traits(rollout.name).third_party and on_gpu and device is not None:
        c = DTYPE_BYTES[rollout.dtype]
        bucket = _bucket_bytes(rollout, c * shape.parameters, c * shape.largest_parameters)
        layer = c * shape.layer_parameters / shape.layers / rollout.tensor_model_parallel_size
        return _third_party_bytes(rollout, phase, device, parts, weights, bucket, layer)
    if phase != "gen" and not overlaps_training:
        frees_kv = rollout.free_cache_engine and rollout.name == "native"
        return weights + parts.graphs + (0.0 if frees_kv else parts.kv)
    if phase not in _PHASES_WITH_WEIGHTS and frees_partial_kv(config):
        return weights + parts.graphs
    return weights + parts.graphs + parts.kv + parts.step


@dataclass(frozen=True)
class EngineFootprint:
    """Bytes of a native engine on one device."""

    weights: float
    graphs: float
    """Memory of CUDA graphs."""
    kv: float
    step: float
    """Activations and logits of the largest step."""

    @property
    def total(self) -> float:
        return self.weights + self.graphs + self.kv + self.step


def engine_footprint(
    rollout: GeneratorConfig,
    shape: ModelShape,
    running: int,
    on_gpu: bool,
    device: DeviceMemory | None,
    resident: float = 0.0,
) -> EngineFootprint:
    """Return the memory with `running` concurrent sequences; `resident` as in `rollout_bytes`."""
    c, ranks = DTYPE_BYTES[rollout.dtype], rollout.tensor_model_parallel_size
    weights = (1 if rollout.quantization else c) * shape.parameters / ranks
    if shape.adapter_parameters is not None and rollout.name == "native":
        weights += _ADAPTER_PADDING * c * shape.adapter_parameters
    truncated = not on_gpu or rollout.top_k > 0 or rollout.top_p < 1 or rollout.min_p > 0
    intermediate = shape.intermediate // ranks
    step = step_bytes(rollout.max_num_batched_tokens, shape.hidden, intermediate, c)
    step += logit_bytes(running, shape.vocab, truncated)
    graphs = 0
    if on_gpu and not rollout.enforce_eager:
        graphs = graph_bytes(shape.hidden, intermediate, c, rollout.max_num_seqs, rollout.max_num_batched_tokens)
    block = NativeOptions.from_config(rollout).block_size
    per_token = bytes_per_token(shape.layers, max(1, shape.kv_heads // ranks), shape.head_dim, c)
    kv = float(rollout.max_num_seqs * math.ceil(rollout.max_model_len / block) * block * per_token)
    if device is not None and on_gpu:
        logits = logit_bytes(rollout.max_num_seqs, shape.vocab)
        free = device.total - int(weights + resident)
        utilization = rollout.gpu_memory_utilization
        kv = min(kv, device_kv_bytes(device.total, free, utilization, int(weights), logits, graphs))
    elif device is not None:
        kv = min(kv, host_kv_bytes(device.total))
    return EngineFootprint(weights, graphs, kv, step)


def _bucket_bytes(rollout: RolloutConfig, weights: float, largest: float) -> float:
    """Return the size of a weight-sync bucket. `weights`, `largest`: bytes of all weights, and of the largest tensor.

    A tensor above the configured size is sent alone and undivided.
    """
    return max(min(weights, rollout.checkpoint_engine.update_weights_bucket_megabytes * 2.0**20), largest)


def _third_party_bytes(
    rollout: RolloutConfig,
    phase: str,
    device: DeviceMemory,
    parts: EngineFootprint,
    resident_weights: float,
    bucket: float,
    layer: float,
) -> float:
    """Return the bytes of a third-party engine, which takes its configured share of the device whatever the model.

    vLLM includes weights, activations and graphs in `gpu_memory_utilization`; SGLang and TensorRT-LLM exclude the
    activations of a step. Outside generation it keeps its process, a bucket buffer, `resident_weights` and, without
    `free_cache_engine`, its KV cache. In a weight sync, before it generates, it has a copy of a bucket (two if its
    ranks have their own processes) and a fused layer.

    `bucket`, `layer`: bytes of a weight-sync bucket and of one layer.
    """
    share = max(rollout.gpu_memory_utilization * device.total, parts.weights)
    kv = 0.0 if rollout.free_cache_engine else share - parts.weights
    process = _PROCESS_BYTES + bucket if runs_in_own_process(rollout) else 0.0
    if phase != "gen":
        return process + resident_weights + kv
    copies = bucket * (1 if rollout.tensor_model_parallel_size == 1 else 2) + layer
    return process + max(share + (0.0 if rollout.name == "vllm" else parts.step), parts.weights + kv + copies)


@dataclass(frozen=True)
class RewardServerMemory:
    """Memory of a served reward model, which has a full copy on every rank of its pool."""

    config: PPOConfig
    shape: ModelShape
    generates: bool
    """Whether it is a causal LM; otherwise it is a classifier, which has no KV cache."""

    @classmethod
    def from_config(cls, config: PPOConfig, shapes: Mapping[str, ModelShape]) -> RewardServerMemory | None:
        """Return None if the run serves no reward model, or its shape is unknown. `shapes` as in `memory_plan`."""
        shape = shapes.get("judge", shapes.get("reward_model"))
        return cls(config, shape, "judge" in shapes) if shape is not None and serves_reward_model(config) else None

    def bytes(self, phase: str, device: DeviceMemory | None) -> float:
        """Return the bytes on one device in `phase`: all, or those that remain there while the model is offloaded."""
        parts, on_gpu = self._parts(device), self.config.trainer.device == "cuda"
        if phase == "judge" or not self.is_offloaded:
            return parts.total
        return parts.graphs if on_gpu else parts.weights  # weights on a CPU are not moved

    @property
    def is_offloaded(self) -> bool:
        """Whether the model is offloaded to the host outside its phase."""
        return reward_server_shares_devices(self.config)

    def model(self) -> FSDPModelMemory:
        """Return the memory of the model alone, by which the host memory of an offloaded copy is planned."""
        size = DTYPE_BYTES[self._dtype]
        return FSDPModelMemory(self.shape, compute_bytes=size, frozen=True, device=self.config.trainer.device)

    def _parts(self, device: DeviceMemory | None) -> EngineFootprint:
        rollout = self.config.reward_model.rollout
        length = rollout.max_model_len or self.shape.positions
        if length is None:  # the server would raise the same error
            raise ValueError("reward_model.rollout.max_model_len: the model's config has no maximum length. Set it.")
        from verl.inference.serving.model import engine_config  # imports the web server

        engine = engine_config(rollout, length)
        engine.dtype = self._dtype
        parts = engine_footprint(engine, self.shape, rollout.max_num_seqs, self.config.trainer.device == "cuda", device)
        return parts if self.generates else EngineFootprint(parts.weights, 0.0, 0.0, parts.step)

    @property
    def _dtype(self) -> str:
        dtype = self.config.reward_model.rollout.dtype
        return dtype if dtype != "auto" else "bfloat16" if self.config.trainer.device == "cuda" else "float32"
