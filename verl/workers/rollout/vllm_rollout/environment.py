"""The environment variables of a process that runs vLLM; to be set before vLLM is imported there."""

from __future__ import annotations

import os

import torch

from verl.config import RolloutConfig
from verl.utils.resources import split_cores

__all__ = ["environment"]


def environment(config: RolloutConfig, device: torch.device | str) -> dict[str, str]:
    """What a user has set stays, but for what nothing works without."""
    wanted = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if torch.device(device).type == "cpu":
        ranks = config.tensor_model_parallel_size
        wanted["VLLM_CPU_KVCACHE_SPACE"] = "1"
        # Alone in its process or beside a trainer it shares the cores with others; ranks of one engine divide them.
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = "nobind" if ranks == 1 else split_cores(ranks)
    else:
        # It samples with generators of its own; requests here have seeds.
        wanted["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    found = {name: value for name, value in wanted.items() if name not in os.environ}
    # Steps are made by our thread, which the engine's core must share a process with.
    return found | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
