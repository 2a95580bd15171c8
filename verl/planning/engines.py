"""What a rollout engine takes of a device, by phase: ours by its parts, another project's by the share it is given."""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl.config import names
from verl.config.asynchronous import async_settings
from verl.config.layout import layout_of, shares_devices
from verl.config.ppo import PPOConfig
from verl.config.rollout import GeneratorConfig, RolloutConfig
from verl.inference.build import NativeOptions
from verl.inference.graphs import pool_bytes
from verl.inference.kv_memory import bytes_per_token, device_room, host_room, logit_bytes, step_bytes
from verl.planning.phases import GB, DeviceMemory
from verl.planning.shapes import ModelShape

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "bfloat16": 2, "float16": 2, "float32": 4}
# A second process on a GPU: driver context, workspaces of libraries, what torch keeps for later.
_PROCESS = int(1.0 * GB)
# Answers are scored before the step's last generation is known to be the last.
_WITH_WEIGHTS = ("gen", "reward", "judge")


def samples(config: PPOConfig) -> int:
    """Answers of one generation batch."""
    return config.data.gen_batch_size * config.actor_rollout_ref.rollout.n


def beside(rollout: RolloutConfig) -> bool:
    """Whether the engine has processes of its own on the worker's devices."""
    return names.rollout_traits(rollout.name).third_party and not rollout.in_process and not rollout.server_urls


def engine_bytes(
    config: PPOConfig, shape: ModelShape, phase: str, device: DeviceMemory | None, resting: float
) -> float:
    """On one device while `phase` runs. `resting`: what was there when the engine chose its KV."""
    rollout, on_gpu = config.actor_rollout_ref.rollout, config.trainer.device == "cuda"
    if rollout.server_urls:
        return 0.0
    goes_on = config.trainer.mode != "sync" and shares_devices(config)  # while training, with what is ahead of it
    batches = 1 + async_settings(config.trainer).max_staleness if goes_on else 1
    running = min(rollout.max_num_seqs, math.ceil(batches * samples(config) / layout_of(config, "rollout").dp_size))
    parts = engine_parts(rollout, shape, running, on_gpu, device, resting)
    held = parts.weights if phase in _WITH_WEIGHTS or not rollout.free_weights else 0.0
    if names.rollout_traits(rollout.name).third_party and on_gpu and device is not None:
        c = BYTES[rollout.dtype]
        bucket = _bucket(rollout, c * shape.parameters, c * shape.largest_parameters)
        layer = c * shape.layer_parameters / shape.layers / rollout.tensor_model_parallel_size
        return _share(rollout, phase, device, parts.weights, held, parts.step, bucket, layer)
    if phase != "gen" and not goes_on:
        freed = rollout.free_cache_engine and rollout.name == "native"
        return held + parts.graphs + (0.0 if freed else parts.kv)
    return held + parts.graphs + parts.kv + parts.step


@dataclass(frozen=True)
class EngineParts:
    """What an engine of ours takes of one device."""

    weights: float
    graphs: float
    kv: float
    step: float

    @property
    def total(self) -> float:
        return self.weights + self.graphs + self.kv + self.step


def engine_parts(
    rollout: GeneratorConfig,
    shape: ModelShape,
    running: int,
    on_gpu: bool,
    device: DeviceMemory | None,
    resting: float = 0.0,
) -> EngineParts:
    """With `running` sequences at once. `resting`: what was on the device when the engine chose its KV."""
    c, ranks = BYTES[rollout.dtype], rollout.tensor_model_parallel_size
    weights = (1 if rollout.quantization else c) * shape.parameters / ranks
    truncated = not on_gpu or rollout.top_k > 0 or rollout.top_p < 1 or rollout.min_p > 0
    wide = shape.intermediate // ranks
    step = step_bytes(rollout.max_num_batched_tokens, shape.hidden, wide, c)
    step += logit_bytes(running, shape.vocab, truncated)
    graphs = 0
    if on_gpu and not rollout.enforce_eager:
        graphs = pool_bytes(c * shape.hidden, step_bytes(1, shape.hidden, wide, c), rollout.max_num_seqs)
    block = NativeOptions.of(rollout).block_size
    per_token = bytes_per_token(shape.layers, max(1, shape.kv_heads // ranks), shape.head_dim, c)
    kv = float(rollout.max_num_seqs * math.ceil(rollout.max_model_len / block) * block * per_token)
    if device is not None and on_gpu:
        logits = logit_bytes(rollout.max_num_seqs, shape.vocab)
        free = device.total - int(weights + resting)
        kv = min(kv, device_room(device.total, free, rollout.gpu_memory_utilization, int(weights), logits))
    elif device is not None:
        kv = min(kv, host_room(device.total))
    return EngineParts(weights, graphs, kv, step)


def _bucket(rollout: RolloutConfig, weights: float, largest: float) -> float:
    """Of a hand-over; a tensor that is larger goes alone, and whole."""
    return max(min(weights, rollout.checkpoint_engine.update_weights_bucket_megabytes * 2.0**20), largest)


def _share(
    rollout: RolloutConfig,
    phase: str,
    device: DeviceMemory,
    weights: float,
    held: float,
    step: float,
    bucket: float,
    layer: float,
) -> float:
    """Of another project's engine: it takes the share that it is given, whatever the model needs of it.

    vLLM counts weights, activations and graphs into `gpu_memory_utilization`; SGLang and TensorRT-LLM what stays, and
    a step comes on top. Asleep it keeps its process, and weights that are not let go; a bucket's buffer stays for life.
    In a hand-over, before it generates, it has a copy of a bucket, another one for ranks in processes of their own, and
    a layer that is put together.
    """
    share = max(rollout.gpu_memory_utilization * device.total, weights)
    kv = 0.0 if rollout.free_cache_engine else share - weights
    here = _PROCESS + bucket if beside(rollout) else 0.0
    if phase != "gen":
        return here + held + kv
    copies = bucket * (1 if rollout.tensor_model_parallel_size == 1 else 2) + layer
    return here + max(share + (0.0 if rollout.name == "vllm" else step), weights + kv + copies)
