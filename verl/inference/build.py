"""From a model folder and a configuration to an engine: model, KV memory, scheduler and runner put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

from verl.config import ModelConfig, RolloutConfig
from verl.config.rollout import GeneratorConfig
from verl.inference.async_engine import AsyncEngine
from verl.inference.attention.base import AttentionBackend
from verl.inference.attention.torch_attention import TorchAttention
from verl.inference.block_manager import BlockManager
from verl.inference.engine import Engine
from verl.inference.kv_memory import KVMemory, choose_num_blocks
from verl.inference.model_runner import ModelRunner
from verl.inference.models import InferenceModel
from verl.inference.models.loading import MODEL_KINDS, end_tokens, load_inference_model, read_model_config
from verl.inference.scheduler import Scheduler
from verl.inference.tensor_parallel import FollowingEngine, LeadingEngine, LeadingRunner, TensorParallel
from verl.inference.weights import EngineWeights
from verl.utils.device import resolve_dtype
from verl.utils.end_tokens import EndTokens
from verl.utils.tokenizer import hf_tokenizer

__all__ = ["BuiltEngine", "NativeOptions", "build_engine"]


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
    def of(cls, config: GeneratorConfig) -> NativeOptions:
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
    kv: KVMemory
    device: torch.device
    dtype: torch.dtype
    load_tokenizer: Callable[[], Any]
    end_tokens: EndTokens
    pad_token_id: int | None

    def start(self) -> AsyncEngine | FollowingEngine:
        """The loop that drives the engine; on all but the first of several ranks, the one that follows."""
        if self.parallel.size == 1:
            return AsyncEngine(self.engine, self.load_tokenizer)
        if self.parallel.rank == 0:
            return LeadingEngine(self.engine, self.parallel, self.load_tokenizer)
        return FollowingEngine(self.runner, self.parallel)


def build_engine(
    model_path: str,
    model_config: ModelConfig,
    config: RolloutConfig,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> BuiltEngine:
    """The model of a local folder on `device`, in `dtype` (None: `config.dtype`), ready to be stepped."""
    options = NativeOptions.of(config)
    device = torch.empty(0, device=device).device  # with its index, if it has one
    dtype = resolve_dtype(config.dtype, device) if dtype is None else dtype
    hf_config = read_model_config(model_path, model_config)
    parallel = TensorParallel.of_world(config.tensor_model_parallel_size)
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
    kv = KVMemory(model, parallel.smallest(blocks), options.block_size)
    if config.return_routed_experts:
        kv.note_experts(model)
    runner = ModelRunner(
        model,
        _attention_for(device),
        kv,
        config.max_num_seqs,
        config.max_model_len,
        use_graphs=not config.enforce_eager,
        beside_others=not config.free_cache_engine,  # it keeps its memory while others compute, and so may go on
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
        engine=Engine(scheduler, runner if parallel.size == 1 else LeadingRunner(runner, parallel), model.vocab_size),
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
    from verl.inference.attention.triton_attention import TritonAttention

    return TritonAttention()
