"""Expected seconds of the phases of a step, from rates measured on one H200.

On the measured GPU with one rank, the fsdp engine and the native rollout engine the result is an interpolation of
measurements. Everything else is an estimate: other GPUs are scaled by the peak FLOP/s and bandwidth of their data
sheets, and communication between ranks is data divided by the rate of the link.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from verl.config.engine import PREFIX_MIN_SAVING
from verl.config.layout import (
    BLOCK_OF_ROLE,
    actor_is_reference,
    layout_of,
    old_log_probs_from_update,
    serves_reward_model,
    shares_devices,
)
from verl.config.names import TRAINING_ENGINES
from verl.config.ppo import PPOConfig
from verl.config.schema import get_path
from verl.config.supervised import SupervisedConfig
from verl.planning.catalog import GPU, MEASURED_GPU, MEASURED_GPU_RATES, Rates, known_shape
from verl.planning.engines import DTYPE_BYTES, engine_footprint
from verl.planning.host import ModelMemory
from verl.planning.megatron import MegatronModelMemory
from verl.planning.phases import ROLE_OF_PHASE, MemoryPlan
from verl.planning.plan import micro_batch_sizes, role_models, supervised_model, supervised_tokens
from verl.planning.shapes import ModelShape
from verl.utils.buffer_sizes import bytes_per_token

_ENGINE_TABLE = "docs/results.md, The training engine: benchmarks/training_step.py --engine-only --cases a"
_ASYNC_7B = "docs/results.md, Throughput on one GPU, 7B: benchmarks/asynchronous.py --shape qwen2.5-7b"


@dataclass(frozen=True)
class MeasuredRate:
    """Tokens per second of one H200 in passes over sequences of these lengths; `passes`: update or inference."""

    model: str
    passes: str
    tokens_per_second: float
    prompt: int
    response: int
    checkpointing: bool
    source: str


MEASURED_RATES = (
    MeasuredRate("Qwen2.5-0.5B", "update", 110_600, 128, 256, False, _ENGINE_TABLE),
    MeasuredRate("Qwen2.5-1.5B", "update", 49_300, 128, 256, False, f"{_ENGINE_TABLE} (logits in bf16)"),
    MeasuredRate("Qwen2.5-7B", "update", 64 * 2048 / 14.9, 1024, 1024, True, f"{_ASYNC_7B} (update 14.9 s)"),
    MeasuredRate("Qwen2.5-0.5B", "inference", 401_000, 128, 256, False, _ENGINE_TABLE),
    MeasuredRate("Qwen2.5-1.5B", "inference", 167_900, 128, 256, False, f"{_ENGINE_TABLE} (logits in bf16)"),
    MeasuredRate("Qwen2.5-7B", "inference", 64 * 2048 / 3.2, 1024, 1024, True, f"{_ASYNC_7B} (old log-probs 3.2 s)"),
)
# Milliseconds of a decode step by (model, sequences, context), with their sources; `decode_seconds` is fitted to them.
_ENGINES, _INFERENCE = (
    "docs/results.md, Rollout engines: benchmarks/inference.py",
    "docs/results.md, Native engine",
)
MEASURED_DECODE_STEPS = {
    ("Qwen2.5-0.5B", 32, 256): (1.00, _INFERENCE),
    ("Qwen2.5-0.5B", 256, 256): (1.67, _INFERENCE),
    ("Qwen2.5-0.5B", 512, 256): (2.35, _INFERENCE),
    ("Qwen2.5-0.5B", 1024, 256): (3.7, _ENGINES),
    ("Qwen2.5-1.5B", 256, 256): (2.9, _ENGINES),
    ("Qwen2.5-1.5B", 512, 256): (4.8, _ENGINES),
    ("Qwen2.5-1.5B", 1024, 256): (8.5, _ENGINES),
    ("Qwen2.5-7B", 64, 256): (5.0, f"{_ENGINES}; benchmarks/decode_step.py"),
    ("Qwen2.5-7B", 256, 256): (8.1, _ENGINES),
    ("Qwen2.5-7B", 512, 256): (14.6, _ENGINES),
    ("Qwen2.5-7B", 1024, 256): (27.7, _ENGINES),
}
# Rates reached on the H200: a large bf16 product, and reads of weights and KV (docs/results.md).
_MATMUL, _READ = 780e12, 4.15e12
# Fitted to MEASURED_DECODE_STEPS: a step takes this multiple of products and reads, and a part that does not shrink.
_DECODE_FACTOR, _DECODE_FIXED = 1.26, (0.6e-3, 0.4e-3)
# Prefill of 8,192 tokens at 7B: 158 ms, of which 139 ms are products (docs/results.md).
_PREFILL_FACTOR = 158 / 139
# Start and end of a generation phase (docs/results.md, whole steps: 0.53 s, of which 0.45 s are engine steps).
_GENERATION_FIXED = 0.08
# Weight sync of a step in one process: 0.05 s at 0.5B, 0.08 s at 1.5B (docs/results.md, whole steps).
_SYNC_FIXED, _SYNC_PER_PARAMETER = 0.04, 2e-11
# Host time of a micro-batch, per layer: 1,150 tokens at 17,700 and 198,000 tokens/s (docs/results.md, no dynamic).
_HOST_PER_LAYER = {"update": 2.7e-3, "inference": 0.24e-3}
# Assumption for GPUs of different nodes.
_BETWEEN_NODES = 40e9


@dataclass(frozen=True)
class PhaseSeconds:
    """Expected duration of a phase of a step; `measured`: interpolated between measurements, else an estimate."""

    phase: str
    seconds: float
    measured: bool


@dataclass(frozen=True)
class MeanLengths:
    """Mean tokens of prompts and responses; None: the maximum of the configuration."""

    prompt: int | None = None
    response: int | None = None


def step_seconds(
    config: PPOConfig, shapes: Mapping[str, ModelShape], plan: MemoryPlan, gpu: GPU, lengths: MeanLengths
) -> list[PhaseSeconds]:
    """Return the phases of a step of a run, without reward functions and data loading; empty if rates are unknown."""
    if gpu.rates is None:
        return []
    rates, models, exact = gpu.rates, role_models(config, shapes), gpu.name == MEASURED_GPU
    prompt = lengths.prompt or config.data.max_prompt_length
    response = lengths.response or config.data.max_response_length
    rollout_exact = exact and config.actor_rollout_ref.rollout.name == "native" and config.trainer.mode == "sync"
    phases = [
        PhaseSeconds("update_weights", _sync_seconds(shapes["actor"], rates), rollout_exact and _is_single(config)),
        PhaseSeconds(
            "gen",
            _generation_seconds(config, shapes["actor"], plan, rates, prompt, response),
            rollout_exact and layout_of(config, "rollout").ranks_per_copy == 1,
        ),
    ]
    for phase, role in ROLE_OF_PHASE.items():
        name = _computing_model(config, models, phase, role)
        if name is None or (phase == "old_log_prob" and old_log_probs_from_update(config)):
            continue
        if not any(planned.phase == phase for planned in plan.phases):
            continue
        seconds = _phase_seconds(config, models[name], phase, rates, prompt, response)
        measured = exact and _is_measured(models[name], layout_of(config, role).world_size)
        phases.append(PhaseSeconds(phase, seconds, measured))
    return phases


def supervised_seconds(
    config: SupervisedConfig, shape: ModelShape, gpu: GPU, length: int | None = None
) -> list[PhaseSeconds]:
    """Return the only phase of a supervised step; `length`: mean tokens of a row, None: the maximum."""
    if gpu.rates is None:
        return []
    model = supervised_model(config, shape)
    mean = length or config.data.max_length
    tokens = math.ceil(config.rows_per_step * mean / config.dp_size / config.ranks_per_sequence)
    micro_tokens, _ = supervised_tokens(config)
    work = _Passes(model, "update", tokens, math.ceil(tokens / micro_tokens), mean, 1.0, config.trainer.n_gpus_per_node)
    measured = gpu.name == MEASURED_GPU and _is_measured(model, config.ranks)
    return [PhaseSeconds("sft", work.seconds(gpu.rates), measured)]


def total_seconds(config: object, phases: list[PhaseSeconds]) -> float:
    """Return the seconds of a step. Generation on its own devices overlaps training."""
    seconds = {phase.phase: phase.seconds for phase in phases}
    if isinstance(config, PPOConfig) and config.trainer.mode != "sync" and not shares_devices(config):
        generation = seconds.pop("gen")
        return max(generation, sum(seconds.values()))
    return sum(seconds.values())


# ---------------------------------------------------------------- training and inference passes


def forward_flops(shape: ModelShape, kind: str, length: float, response_share: float) -> tuple[float, float]:
    """Return the FLOP of a forward pass per token: in the layers (with causal attention over `length` tokens), and in
    the head, which reads only the tokens of responses."""
    projections = (2 * shape.query_width + 2 * shape.key_width) * shape.hidden
    projections += (3 if shape.gated else 2) * shape.hidden * shape.intermediate
    layers = shape.layers * (2 * projections + 2 * shape.query_width * length)
    head = 2 * shape.embedding_parameters * response_share if kind == "causal_lm" else 0.0
    return float(layers), head


def pass_flops(
    shape: ModelShape, kind: str, passes: str, length: float, share: float, checkpointing: bool, adapters: bool
) -> float:
    """Return the FLOP per token of an update (forward, backward, recomputed layers) or of a pass without gradient."""
    layers, head = forward_flops(shape, kind, length, share)
    if passes == "inference":
        return layers + head
    # Frozen weights have no gradient; the head recomputes its logits.
    return layers * ((2 if adapters else 3) + checkpointing) + head * (3 if adapters else 4)


def reached_flops(passes: str, parameters: float) -> float:
    """Return the FLOP/s of the H200 in passes of a model of this size: interpolated over the logarithm of the size, and
    constant outside the measured sizes."""
    rows = sorted(_reached(row) for row in MEASURED_RATES if row.passes == passes)
    sizes, reached = zip(*rows, strict=True)
    if parameters <= sizes[0] or parameters >= sizes[-1]:
        return float(reached[0] if parameters <= sizes[0] else reached[-1])
    upper = next(index for index, size in enumerate(sizes) if size > parameters)
    low, high = math.log(sizes[upper - 1]), math.log(sizes[upper])
    weight = (math.log(parameters) - low) / (high - low)
    return float(reached[upper - 1] * (1 - weight) + reached[upper] * weight)


def _reached(row: MeasuredRate) -> tuple[float, float]:
    """Return (parameters, FLOP/s) of a measurement."""
    shape, length = known_shape(row.model), row.prompt + row.response
    flops = pass_flops(shape, "causal_lm", row.passes, length, row.response / length, row.checkpointing, False)
    return float(shape.parameters), flops * row.tokens_per_second


@dataclass(frozen=True)
class _Passes:
    """All micro-batches of a phase on one rank."""

    model: ModelMemory
    passes: str
    tokens: int
    micro_batches: int
    length: float
    """Mean tokens of a sequence; a token attends to half of them on average."""
    response_share: float
    gpus_per_node: int

    def seconds(self, rates: Rates) -> float:
        model, shape = self.model, self.model.shape
        checkpointing = bool(model.recompute) if isinstance(model, MegatronModelMemory) else model.checkpointing
        adapters = not isinstance(model, MegatronModelMemory) and model.has_adapters
        split = model.layout.tp * model.layout.pp if isinstance(model, MegatronModelMemory) else 1
        flops = pass_flops(shape, model.kind, self.passes, self.length, self.response_share, checkpointing, adapters)
        rate = reached_flops(self.passes, shape.parameters) * rates.flops / MEASURED_GPU_RATES.flops
        host = self.micro_batches * shape.layers / split * _HOST_PER_LAYER[self.passes]
        compute = max(flops * self.tokens / split / rate, host)
        if isinstance(model, MegatronModelMemory):
            sent = sum(model.communication(self.tokens).values())
            transfer = sent / _link(rates, model.layout.world, self.gpus_per_node)
            return compute / (1 - model.layout.bubble(self.micro_batches)) + transfer
        transfer = self._gathered_bytes() / _link(rates, model.shards, self.gpus_per_node)
        return max(compute, transfer) + 0.1 * min(compute, transfer)  # they overlap, but for a part

    def _gathered_bytes(self) -> float:
        """Bytes that a rank receives: weights once or twice per micro-batch, float32 gradients once."""
        model = self.model
        gathers = 2 if self.passes == "update" else 1
        weights = model.compute_bytes * model.shape.parameters * gathers
        gradients = 4 * model.trained_parameters if self.passes == "update" else 0
        return self.micro_batches * (weights + gradients) * (model.shards - 1) / model.shards


def _is_measured(model: ModelMemory, ranks: int) -> bool:
    """Whether rates of such a model were measured: one rank of the fsdp engine with compiled layers, or frozen."""
    return ranks == 1 and not isinstance(model, MegatronModelMemory) and (model.frozen or model.compiled)


def _link(rates: Rates, ranks: int, gpus_per_node: int) -> float:
    """Bytes per second between `ranks` GPUs."""
    return rates.link if ranks <= gpus_per_node else min(rates.link, _BETWEEN_NODES)


def _computing_model(config: PPOConfig, models: Mapping[str, ModelMemory], phase: str, role: str) -> str | None:
    """Return the name in `models` of the largest model that computes in a phase; None: none of them does."""
    if phase in ("gen", "judge") or (phase == "reward" and serves_reward_model(config)):
        return None
    if role == "ref" and actor_is_reference(config):
        role = "actor"
    names = [name for name in models if name.partition("/")[0] == role]
    return max(names, key=lambda name: models[name].weights(), default=None)


def _phase_seconds(
    config: PPOConfig, model: ModelMemory, phase: str, rates: Rates, prompt: int, response: int
) -> float:
    role, updates = ROLE_OF_PHASE[phase], phase.startswith("update")
    layout, (length, context) = layout_of(config, role), _computed_tokens(config, role, prompt, response)
    samples = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    epochs, steps = 1, 1
    if updates:
        block = get_path(config, BLOCK_OF_ROLE[role])
        epochs, steps = block.ppo_epochs, max(1, config.data.train_batch_size // block.ppo_mini_batch_size)
    tokens = math.ceil(samples * length / layout.dp_size / layout.ranks_per_sequence)
    micro_tokens, _, _ = micro_batch_sizes(config, phase)
    micro_batches = max(steps, math.ceil(tokens / micro_tokens))
    kind, gpus_per_node = "update" if updates else "inference", config.trainer.n_gpus_per_node
    passes = _Passes(model, kind, tokens, micro_batches, context, response / length, gpus_per_node)
    return epochs * passes.seconds(rates) + _offload_seconds(config, role, model, updates, rates)


def _computed_tokens(config: PPOConfig, role: str, prompt: int, response: int) -> tuple[float, float]:
    """Return the tokens computed per response, and the length of a sequence whose tokens attend to as many tokens.

    Both are `prompt` + `response` unless the responses to a prompt share its computation.
    """
    length, n = float(prompt + response), config.actor_rollout_ref.rollout.n
    saved, mode = prompt * (n - 1) / n, get_path(config, BLOCK_OF_ROLE[role]).use_prefix_grouper
    if mode == "false" or (mode == "auto" and saved < PREFIX_MIN_SAVING * length):
        return length, length
    return length - saved, (length**2 - saved * prompt) / (length - saved)


def _offload_seconds(config: PPOConfig, role: str, model: ModelMemory, updates: bool, rates: Rates) -> float:
    """Copies of offloaded state to the device before a phase and back after an update."""
    block = get_path(config, BLOCK_OF_ROLE["actor" if role == "ref" and actor_is_reference(config) else role])
    engine = block[TRAINING_ENGINES[block.strategy].block]
    moved = (2 if updates else 1) * model.weights() if engine.param_offload else 0.0
    if updates and engine.optimizer_offload:
        moved += 2 * model.moments()
    return moved / rates.host_link


# ---------------------------------------------------------------- generation and weight sync


def decode_seconds(
    shape: ModelShape, sequences: float, context: float, rates: Rates, ranks: int = 1, size: int = 2
) -> float:
    """Return the seconds of a decode step of `sequences` sequences with `context` tokens each, on `ranks` ranks.

    Weights are read or multiplied, whichever takes longer, and the KV cache is read. `size`: bytes of a number.
    """
    matmul, read = (
        _MATMUL * rates.flops / MEASURED_GPU_RATES.flops,
        _READ * rates.bandwidth / MEASURED_GPU_RATES.bandwidth,
    )
    weights = shape.parameters - (0 if shape.tied else shape.embedding_parameters)
    kv = sequences * context * bytes_per_token(shape.layers, max(1, shape.kv_heads // ranks), shape.head_dim, size)
    products = sum(forward_flops(shape, "causal_lm", 0, 1.0)) * sequences / ranks / matmul
    limit = max(size * weights / ranks / read, products) + kv / read
    base, slope = _DECODE_FIXED
    return base + slope * min(1.0, sequences / 256) + _DECODE_FACTOR * limit


def _generation_seconds(
    config: PPOConfig, shape: ModelShape, plan: MemoryPlan, rates: Rates, prompt: int, response: int
) -> float:
    """Return the seconds of the generation of a batch; the longest response has the maximum length."""
    rollout = config.actor_rollout_ref.rollout
    layout, size, ranks = layout_of(config, "rollout"), DTYPE_BYTES[rollout.dtype], rollout.tensor_model_parallel_size
    prompts = config.data.train_batch_size / layout.dp_size
    responses = prompts * rollout.n
    parts = engine_footprint(rollout, shape, rollout.max_num_seqs, True, plan.device)
    kv = max(0.0, plan.phase("gen").parts["rollout"] - parts.weights - parts.graphs - parts.step)
    per_token = bytes_per_token(shape.layers, max(1, shape.kv_heads // ranks), shape.head_dim, size)
    running = min(responses, rollout.max_num_seqs)
    if kv >= per_token * (prompt + response):  # less than one sequence: the run does not fit
        running = min(running, kv / (per_token * (prompt + response)))
    steps = max(float(config.data.max_response_length), responses * response / running)
    mean_running = responses * response / steps
    rate = _MATMUL * rates.flops / MEASURED_GPU_RATES.flops
    prefilled = (prompts if rollout.enable_prefix_caching else responses) * prompt
    prefill = _PREFILL_FACTOR * forward_flops(shape, "causal_lm", prompt, 0.0)[0] * prefilled / ranks / rate
    step = decode_seconds(shape, mean_running, prompt + response / 2, rates, ranks, size)
    return _GENERATION_FIXED + prefill + steps * step


def _sync_seconds(shape: ModelShape, rates: Rates) -> float:
    return _SYNC_FIXED + _SYNC_PER_PARAMETER * shape.parameters * MEASURED_GPU_RATES.bandwidth / rates.bandwidth


def _is_single(config: PPOConfig) -> bool:
    """Whether training and generation are one process."""
    return shares_devices(config) and layout_of(config, "actor").world_size == 1
