"""`actor_rollout_ref.rollout` as the arguments of SGLang's engine."""

from __future__ import annotations

import json
from typing import Any

import torch

from verl.config import ModelConfig, RolloutConfig

__all__ = ["engine_arguments"]


def engine_arguments(
    model_path: str, model_config: ModelConfig, config: RolloutConfig, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Arguments of SGLang's `Engine`: the configuration's keys, then `engine_kwargs.sglang` as it is."""
    own: dict[str, Any] = {
        # Tokens in, tokens out; each is told when it was sampled, or a pause would not know of it.
        "skip_tokenizer_init": True,
        "stream_interval": 1,
        "incremental_streaming_output": True,
        "enable_memory_saver": device.type == "cuda",
    }
    usual: dict[str, Any] = {
        "model_path": model_path,
        "trust_remote_code": model_config.trust_remote_code,
        "json_model_override_args": json.dumps(dict(model_config.override_config)),
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": config.quantization,
        "load_format": config.load_format,
        "random_seed": config.seed,
        "context_length": config.max_model_len,
        "max_running_requests": config.max_num_seqs,
        "max_prefill_tokens": config.max_num_batched_tokens,
        "chunked_prefill_size": config.max_num_batched_tokens if config.enable_chunked_prefill else -1,
        "mem_fraction_static": config.gpu_memory_utilization,
        "tp_size": config.tensor_model_parallel_size,
        "ep_size": config.expert_parallel_size,
        "disable_radix_cache": not config.enable_prefix_caching,
        "disable_cuda_graph": config.enforce_eager or device.type == "cpu",
        "sampling_defaults": "openai",
        "log_level": "error",
        "grammar_backend": "none",
    }
    usual |= _on_cuda(config, device) if device.type == "cuda" else _ON_CPU
    given = dict(config.engine_kwargs["sglang"] if "sglang" in config.engine_kwargs else {})
    taken = sorted(given.keys() & own.keys())
    if taken:
        raise ValueError(
            f"engine_kwargs.sglang.{taken[0]}: is {own[taken[0]]!r} for every SGLang rollout, and cannot be set. Leave"
            " it out."
        )
    return usual | given | own


_ON_CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
}


def _on_cuda(config: RolloutConfig, device: torch.device) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "device": "cuda",
        "base_gpu_id": device.index or 0,
        # Without it, a copy of the weights would not survive their release.
        "enable_weights_cpu_backup": not config.free_weights,
    }
    if config.cudagraph_capture_sizes is not None:
        chosen["cuda_graph_bs_decode"] = config.cudagraph_capture_sizes
    return chosen
