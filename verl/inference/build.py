"""Build an engine from a model folder and a configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from verl.config import ModelConfig, RolloutConfig
from verl.config.devices import host_memory_available
from verl.config.rollout import NativeOptions, applies_lora
from verl.inference.async_engine import AsyncEngine
from verl.inference.attention import AttentionBackend, TorchAttention
from verl.inference.block_manager import BlockManager
from verl.inference.engine import Engine
from verl.inference.graphs import GraphOptions
from verl.inference.lora import AdapterOptions
from verl.inference.model_runner import KVCache, ModelRunner, bytes_per_block
from verl.inference.models import InferenceModel
from verl.inference.models.fused import FusedModel, unsupported_reason
from verl.inference.models.generic import GenericModel
from verl.inference.scheduler import Scheduler
from verl.inference.tensor_parallel import SINGLE, FollowerEngine, LeaderEngine, LeaderRunner, TensorParallel
from verl.inference.weights import EngineWeights
from verl.models.loading import empty_model, pretrained_model, read_config
from verl.models.lora import Adapters
from verl.utils.buffer_sizes import device_kv_bytes, graph_bytes, host_kv_bytes, inner_size, logit_bytes
from verl.utils.device import resolve_dtype
from verl.utils.end_tokens import EndTokens, find_end_tokens
from verl.utils.tokenizer import hf_tokenizer, tokenizer_if_any

__all__ = [
    "BuiltEngine",
    "build_engine",
    "choose_num_blocks",
    "default_end_tokens",
    "load_inference_model",
    "load_module",
    "policy_adapters",
    "read_hf_config",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuiltEngine:
    """An engine and its parts."""

    engine: Engine
    runner: ModelRunner
    parallel: TensorParallel
    model: InferenceModel
    weights: EngineWeights
    kv: KVCache
    device: torch.device
    dtype: torch.dtype
    load_tokenizer: Callable[[], Any]
    end_tokens: EndTokens
    pad_token_id: int | None

    def start(self) -> AsyncEngine | FollowerEngine:
        """Return the engine that runs steps in a thread; with several ranks, the first leads and the others follow."""
        if self.parallel.size == 1:
            return AsyncEngine(self.engine, self.load_tokenizer)
        if self.parallel.rank == 0:
            return LeaderEngine(self.engine, self.parallel, self.load_tokenizer)
        return FollowerEngine(self.runner, self.parallel)


def build_engine(
    model_path: str,
    model_config: ModelConfig,
    config: RolloutConfig,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    adapters: AdapterOptions | None = None,
) -> BuiltEngine:
    """Load the model of a local folder on `device` in `dtype` (None: `config.dtype`) and build its engine.

    `adapters`: slots for LoRA adapters that requests select; None: those of `policy_adapters`.
    """
    options = NativeOptions.from_config(config)
    device = torch.empty(0, device=device).device  # resolves the device index
    dtype = resolve_dtype(config.dtype, device) if dtype is None else dtype
    hf_config = read_hf_config(model_path, model_config)
    parallel = TensorParallel.from_world(config.tensor_model_parallel_size)
    if adapters is None and applies_lora(model_config, config):
        adapters = policy_adapters(hf_config, model_config)
    model = load_inference_model(
        model_path,
        hf_config,
        model_config,
        config.max_model_len,
        device,
        dtype,
        config.load_format,
        options.model,
        parallel,
        adapters,
    )
    graphs = _graph_options(config, hf_config, dtype, parallel)
    blocks = options.num_blocks or choose_num_blocks(
        model,
        options.block_size,
        config.max_num_seqs,
        config.max_model_len,
        config.gpu_memory_utilization,
        0 if graphs is None else graphs.reserved_bytes,
    )
    # Ranks that share the model execute the same block tables, so all have the same number of blocks.
    kv = KVCache(model, parallel.all_reduce_min(blocks), options.block_size)
    if config.return_routed_experts:
        kv.record_experts(model)
    runner = ModelRunner(
        model,
        _attention_backend(device),
        kv,
        config.max_num_seqs,
        config.max_model_len,
        graphs,
        own_stream=not config.free_cache_engine,  # the engine then runs concurrently with training
    )
    scheduler = Scheduler(
        BlockManager(kv.num_blocks, kv.block_size, config.enable_prefix_caching),
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.max_model_len,
        config.enable_chunked_prefill,
        returns_experts=config.return_routed_experts,
        selects_adapters=adapters is not None and not adapters.shared,
    )
    return BuiltEngine(
        engine=Engine(scheduler, runner if parallel.size == 1 else LeaderRunner(runner, parallel), model.vocab_size),
        runner=runner,
        parallel=parallel,
        model=model,
        weights=_engine_weights(model, dtype, parallel, keep=not config.free_weights),
        kv=kv,
        device=device,
        dtype=dtype,
        load_tokenizer=partial(hf_tokenizer, model_path, trust_remote_code=model_config.trust_remote_code),
        end_tokens=default_end_tokens(model_path, hf_config, model_config),
        pad_token_id=hf_config.get_text_config(decoder=True).pad_token_id,
    )


def _graph_options(
    config: RolloutConfig, hf_config: Any, dtype: torch.dtype, parallel: TensorParallel
) -> GraphOptions | None:
    """The options of CUDA graphs; None: steps run eagerly."""
    if config.enforce_eager:
        return None
    text = hf_config.get_text_config(decoder=True)
    inner, tokens = inner_size(text) // parallel.size, config.max_num_batched_tokens
    reserved = graph_bytes(text.hidden_size, inner, dtype.itemsize, config.max_num_seqs, tokens)
    return GraphOptions(tokens, reserved, in_lockstep=parallel.size > 1)


def policy_adapters(hf_config: Any, model_config: ModelConfig) -> AdapterOptions:
    """One slot for the adapter that training updates, on the layers that training selects."""
    module = empty_model(hf_config, "causal_lm", torch.bfloat16, model_config.trust_remote_code)
    return AdapterOptions(model_config.lora_rank, layers=Adapters(module, "causal_lm", model_config).layers)


def _engine_weights(
    model: InferenceModel, dtype: torch.dtype, parallel: TensorParallel, keep: bool = True
) -> EngineWeights:
    """The weights that a weight sync updates: with a policy's adapter, also its matrices."""
    weights, shards, adapters = model.named_weights(), model.shards(), model.adapters
    if adapters is None or not adapters.options.shared:
        return EngineWeights(weights, model.region, dtype, shards, parallel, keep)
    shards |= adapters.shards()
    return EngineWeights(
        weights, model.region, dtype, shards, parallel, keep, adapters.weights(), reset_adapters=adapters.clear
    )


def _attention_backend(device: torch.device) -> AttentionBackend:
    """The attention backend for a device."""
    if device.type != "cuda":
        return TorchAttention()
    from verl.inference.kernels.paged_attention import TritonAttention

    return TritonAttention()


def read_hf_config(path: str, model_config: ModelConfig) -> Any:
    """The HF config of a model folder, with the same overrides as in training."""
    return read_config(path, model_config.trust_remote_code, model_config.override_config)


def load_inference_model(
    path: str,
    hf_config: Any,
    model_config: ModelConfig,
    max_length: int,
    device: torch.device,
    dtype: torch.dtype,
    load_format: str = "auto",
    kind: str = "auto",
    parallel: TensorParallel = SINGLE,
    adapters: AdapterOptions | None = None,
) -> InferenceModel:
    """Load the model on `device` in `dtype`; with load_format=dummy, weights are undefined until the first update."""
    remote_code = model_config.trust_remote_code and getattr(hf_config, "auto_map", None)
    reason = "its code comes with the checkpoint" if remote_code else unsupported_reason(hf_config, max_length)
    if kind == "fused" and reason:
        raise ValueError(
            f"engine_kwargs.native.model: fused cannot run this {hf_config.model_type} model: {reason}. Set it to auto."
        )
    if parallel.size > 1 and (kind == "generic" or reason):
        raise ValueError(
            f"tensor_model_parallel_size: {parallel.size}; only fused models run on several ranks, but this"
            f" {hf_config.model_type} is not one ({reason or 'engine_kwargs.native.model=generic'}). Set it to 1."
        )
    if kind == "generic" or reason:
        reason = reason or "engine_kwargs.native.model=generic"
        logger.info("rollout: %s runs with its transformers module (%s)", hf_config.model_type, reason)
        module = load_module(path, hf_config, model_config, load_format, device, dtype)
        return GenericModel(module, max_length, device, dtype, adapters)
    model = FusedModel(hf_config, max_length, dtype, device, parallel, adapters)
    if load_format != "dummy":
        module = pretrained_model(path, hf_config, "causal_lm", model_config.trust_remote_code)
        EngineWeights(model.named_weights(), model.region, dtype, model.shards(), parallel).load(module.state_dict())
    return model


def load_module(
    path: str,
    hf_config: Any,
    model_config: ModelConfig,
    load_format: str,
    device: torch.device,
    dtype: torch.dtype,
) -> Any:
    """The Hugging Face module: the stored weights in host memory, or random ones of `dtype` on the device (dummy)."""
    if load_format != "dummy":
        return pretrained_model(path, hf_config, "causal_lm", model_config.trust_remote_code)
    from transformers import AutoModelForCausalLM

    # Values that the first update overwrites must not advance the global random state.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        return AutoModelForCausalLM.from_config(
            hf_config, dtype=dtype, trust_remote_code=model_config.trust_remote_code
        )


def default_end_tokens(path: str, hf_config: Any, model_config: ModelConfig) -> EndTokens:
    """The model's end tokens, for requests that name none (`meta_info["eos_token_id"]` of a generation is unset)."""
    return find_end_tokens(path, hf_config, tokenizer_if_any(path, model_config.trust_remote_code))


def choose_num_blocks(
    model: InferenceModel,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
    gpu_memory_utilization: float,
    graphs: int = 0,
) -> int:
    """Number of blocks for `max_num_seqs` sequences of `max_model_len` tokens, or as many as fit; logs it.

    On a GPU, weights and KV take at most `gpu_memory_utilization` of its memory, and never more than is free beside
    `graphs` bytes of CUDA graphs. On a CPU, KV takes at most a quarter of the available memory.
    """
    block_bytes = bytes_per_block(model, block_size)
    per_sequence = -(-max_model_len // block_size)
    needed = max_num_seqs * per_sequence
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(model.device)
        logits = logit_bytes(max_num_seqs, model.vocab_size)
        available = device_kv_bytes(total, free, gpu_memory_utilization, model.region.size, logits, graphs)
        remedy = "Raise gpu_memory_utilization, or lower max_model_len"
    else:
        available = host_kv_bytes(host_memory_available())
        remedy = "Free host memory, or lower max_model_len"
    blocks = min(needed, available // block_bytes)
    if blocks < per_sequence:
        raise ValueError(
            f"max_model_len: the KV of one sequence of {max_model_len} tokens takes"
            f" {_gb(per_sequence * block_bytes)}, but only {_gb(available)} are available. {remedy}."
        )
    logger.info(
        "rollout: %s of KV cache: %d blocks of %d tokens (%s)",
        _gb(blocks * block_bytes),
        blocks,
        block_size,
        f"enough for {max_num_seqs} sequences of {max_model_len} tokens"
        if blocks == needed
        else f"{blocks / needed:.0%} of what {max_num_seqs} sequences of {max_model_len} tokens can use",
    )
    return blocks


def _gb(size: int) -> str:
    return f"{size / 2**30:.2f} GB"
