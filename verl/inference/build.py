"""From a model folder and a configuration to an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

from verl.config import ModelConfig, RolloutConfig
from verl.config.rollout import GeneratorConfig
from verl.inference.async_engine import AsyncEngine
from verl.inference.attention import AttentionBackend, TorchAttention
from verl.inference.block_manager import BlockManager
from verl.inference.engine import Engine
from verl.inference.memory import KVCache, choose_num_blocks
from verl.inference.model_runner import ModelRunner
from verl.inference.models import InferenceModel
from verl.inference.models.fused import FusedModel, unsupported_reason
from verl.inference.models.generic import GenericModel
from verl.inference.scheduler import Scheduler
from verl.inference.tensor_parallel import SINGLE, FollowerEngine, LeaderEngine, LeaderRunner, TensorParallel
from verl.inference.weights import EngineWeights
from verl.models.loading import pretrained_model, read_config
from verl.utils.device import resolve_dtype
from verl.utils.end_tokens import EndTokens, find_end_tokens
from verl.utils.tokenizer import hf_tokenizer, tokenizer_if_any

__all__ = [
    "MODEL_KINDS",
    "BuiltEngine",
    "NativeOptions",
    "build_engine",
    "end_tokens",
    "load_inference_model",
    "load_module",
    "read_hf_config",
]


@dataclass(frozen=True)
class NativeOptions:
    """`rollout.engine_kwargs.native`: what is rarely set."""

    block_size: int = 16
    """Tokens per KV block."""
    num_blocks: int | None = None
    """KV blocks; None: as many as memory allows."""
    model: str = "auto"
    """fused, generic, or whichever runs the model."""

    @classmethod
    def from_config(cls, config: GeneratorConfig) -> NativeOptions:
        given = dict(config.engine_kwargs["native"] if "native" in config.engine_kwargs else {})
        where, known = "engine_kwargs.native", [field.name for field in fields(cls)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ValueError(f"{where}.{unknown[0]}: there is no such option. There are {', '.join(known)}.")
        options = cls(**given)
        if options.model not in MODEL_KINDS:
            raise ValueError(f"{where}.model: {options.model!r} is unknown. Use one of {', '.join(MODEL_KINDS)}.")
        if options.block_size < 1 or (options.num_blocks is not None and options.num_blocks < 1):
            raise ValueError(f"{where}: block_size and num_blocks are at least 1 (found {given}).")
        return options


@dataclass(frozen=True)
class BuiltEngine:
    """An engine and the parts of it that its owner needs."""

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
        """The loop that drives the engine; on all but the first of several ranks, the one that follows."""
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
) -> BuiltEngine:
    """The model of a local folder on `device`, in `dtype` (None: `config.dtype`), ready to be stepped."""
    options = NativeOptions.from_config(config)
    device = torch.empty(0, device=device).device  # with its index, if it has one
    dtype = resolve_dtype(config.dtype, device) if dtype is None else dtype
    hf_config = read_hf_config(model_path, model_config)
    parallel = TensorParallel.from_world(config.tensor_model_parallel_size)
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
    )
    blocks = options.num_blocks or choose_num_blocks(
        model, options.block_size, config.max_num_seqs, config.max_model_len, config.gpu_memory_utilization
    )
    # Block numbers mean the same on all ranks that share the model.
    kv = KVCache(model, parallel.all_reduce_min(blocks), options.block_size)
    if config.return_routed_experts:
        kv.record_experts(model)
    runner = ModelRunner(
        model,
        _attention_for(device),
        kv,
        config.max_num_seqs,
        config.max_model_len,
        use_graphs=not config.enforce_eager,
        own_stream=not config.free_cache_engine,  # it keeps its memory while others compute, and so may go on
    )
    scheduler = Scheduler(
        BlockManager(kv.num_blocks, kv.block_size, config.enable_prefix_caching),
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.max_model_len,
        config.enable_chunked_prefill,
        returns_experts=config.return_routed_experts,
    )
    return BuiltEngine(
        engine=Engine(scheduler, runner if parallel.size == 1 else LeaderRunner(runner, parallel), model.vocab_size),
        runner=runner,
        parallel=parallel,
        model=model,
        weights=EngineWeights(
            model.named_weights(), model.region, dtype, model.shards(), parallel, keep=not config.free_weights
        ),
        kv=kv,
        device=device,
        dtype=dtype,
        load_tokenizer=partial(hf_tokenizer, model_path, trust_remote_code=model_config.trust_remote_code),
        end_tokens=end_tokens(model_path, hf_config, model_config),
        pad_token_id=hf_config.get_text_config(decoder=True).pad_token_id,
    )


def _attention_for(device: torch.device) -> AttentionBackend:
    """The attention kernels of a kind of device."""
    if device.type != "cuda":
        return TorchAttention()
    from verl.inference.kernels.paged_attention import TritonAttention

    return TritonAttention()


logger = logging.getLogger(__name__)

MODEL_KINDS = ("auto", "fused", "generic")


def read_hf_config(path: str, model_config: ModelConfig) -> Any:
    """The HF config with the overrides that training has too."""
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
) -> InferenceModel:
    """The model on `device` in `dtype`. With load_format=dummy its weights are whatever; an update brings them."""
    foreign = model_config.trust_remote_code and getattr(hf_config, "auto_map", None)
    against = "its code comes with the checkpoint" if foreign else unsupported_reason(hf_config, max_length)
    if kind == "fused" and against:
        raise ValueError(
            f"engine_kwargs.native.model: fused cannot run this {hf_config.model_type} model: {against}. Set it to"
            " auto."
        )
    if parallel.size > 1 and (kind == "generic" or against):
        raise ValueError(
            f"tensor_model_parallel_size: {parallel.size}; only fused models run on several ranks, and this"
            f" {hf_config.model_type} is not one ({against or 'generic was asked for'}). Set it to 1."
        )
    if kind == "generic" or against:
        logger.info("rollout: %s runs by its own module (%s)", hf_config.model_type, against or "asked for")
        module = load_module(path, hf_config, model_config, load_format, device, dtype)
        return GenericModel(module, max_length, device, dtype)
    model = FusedModel(hf_config, max_length, dtype, device, parallel)
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
    """The Hugging Face module: stored weights in host memory, or random ones of `dtype` on the device."""
    if load_format != "dummy":
        return pretrained_model(path, hf_config, "causal_lm", model_config.trust_remote_code)
    from transformers import AutoModelForCausalLM

    # Throw-away values must not shift anyone's random numbers.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        return AutoModelForCausalLM.from_config(
            hf_config, dtype=dtype, trust_remote_code=model_config.trust_remote_code
        )


def end_tokens(path: str, hf_config: Any, model_config: ModelConfig) -> EndTokens:
    """What ends an answer of this model unless a request says otherwise."""
    return find_end_tokens(path, hf_config, tokenizer_if_any(path, model_config.trust_remote_code))
