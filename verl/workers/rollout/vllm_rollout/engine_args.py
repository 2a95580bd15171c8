"""`actor_rollout_ref.rollout` as the arguments of vLLM's engine."""

from __future__ import annotations

from typing import Any

import torch

from verl.config import ModelConfig, RolloutConfig
from verl.workers.rollout.vllm_rollout.worker import WORKER_EXTENSION

__all__ = ["engine_arguments"]


def engine_arguments(
    model_path: str, model_config: ModelConfig, config: RolloutConfig, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs`: the configuration's keys, then `engine_kwargs.vllm` as it is."""
    own: dict[str, Any] = {
        "worker_extension_cls": WORKER_EXTENSION,
        "distributed_executor_backend": "uni" if config.tensor_model_parallel_size == 1 else "mp",
        # Log-probs are those of what was drawn from, at the request's temperature.
        "logprobs_mode": "processed_logprobs",
        # Tokens in, tokens out: text is nobody's business here, and end tokens come with each request.
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "enable_sleep_mode": device.type == "cuda",
        **({"enable_return_routed_experts": True} if config.return_routed_experts else {}),
    }
    usual: dict[str, Any] = {
        "model": model_path,
        "trust_remote_code": model_config.trust_remote_code,
        "hf_overrides": dict(model_config.override_config),
        "dtype": str(dtype).removeprefix("torch."),
        "load_format": config.load_format,
        "seed": config.seed,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "enable_expert_parallel": config.expert_parallel_size > 1,
        "quantization": config.quantization,
        "cudagraph_capture_sizes": config.cudagraph_capture_sizes,
        "enforce_eager": config.enforce_eager or device.type == "cpu",
        "enable_prefix_caching": config.enable_prefix_caching,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    given = dict(config.engine_kwargs["vllm"] if "vllm" in config.engine_kwargs else {})
    taken = sorted(given.keys() & own.keys())
    if taken:
        raise ValueError(
            f"engine_kwargs.vllm.{taken[0]}: is {own[taken[0]]!r} for every vLLM rollout, and cannot be set. Leave it"
            " out."
        )
    return usual | given | own
