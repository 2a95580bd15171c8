"""`actor_rollout_ref.rollout` as the arguments of TensorRT-LLM's `AsyncLLM`."""

from __future__ import annotations

from typing import Any

import torch

from verl.config import ModelConfig, RolloutConfig

__all__ = ["engine_arguments"]


def engine_arguments(
    model_path: str, model_config: ModelConfig, config: RolloutConfig, dtype: torch.dtype
) -> dict[str, Any]:
    """The configuration's keys, then `engine_kwargs.trtllm` as it is: what it does not know, it refuses by itself."""
    from tensorrt_llm.llmapi import CudaGraphConfig, KvCacheConfig, SleepConfig

    graphs = {} if config.cudagraph_capture_sizes is None else {"batch_sizes": list(config.cudagraph_capture_sizes)}
    own: dict[str, Any] = {
        # Tokens in, tokens out; each is told when it was sampled, or a pause would not know of it.
        "skip_tokenizer_init": True,
        "stream_interval": 1,
    }
    usual: dict[str, Any] = {
        "model": model_path,
        "trust_remote_code": model_config.trust_remote_code,
        "model_kwargs": dict(model_config.override_config) or None,
        "dtype": str(dtype).removeprefix("torch."),
        "load_format": config.load_format,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "max_seq_len": config.max_model_len,
        "max_batch_size": config.max_num_seqs,
        "max_num_tokens": config.max_num_batched_tokens,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "kv_cache_config": KvCacheConfig(
            enable_block_reuse=config.enable_prefix_caching, free_gpu_memory_fraction=config.gpu_memory_utilization
        ),
        "cuda_graph_config": None if config.enforce_eager else CudaGraphConfig(**graphs),
        "sleep_config": SleepConfig(),
        # Ranks of other replicas share the devices' order, which its own all-reduce relies on.
        "allreduce_strategy": "NCCL",
    }
    given = dict(config.engine_kwargs["trtllm"] if "trtllm" in config.engine_kwargs else {})
    taken = sorted(given.keys() & own.keys())
    if taken:
        raise ValueError(
            f"engine_kwargs.trtllm.{taken[0]}: is {own[taken[0]]!r} for every TensorRT-LLM rollout, and cannot be set."
            " Leave it out."
        )
    return usual | given | own
