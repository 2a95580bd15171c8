"""The environment variables of a process that runs SGLang; to be set before SGLang is imported there."""

from __future__ import annotations

import os

import torch

from verl.config import RolloutConfig
from verl.utils.resources import split_cores

__all__ = ["environment"]


def environment(config: RolloutConfig, device: torch.device | str) -> dict[str, str]:
    """Those that are not set already: what a user has set stays."""
    wanted = {
        # Log-probs at the request's temperature, not at 1.
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
    }
    if torch.device(device).type == "cpu":
        wanted["SGLANG_USE_CPU_ENGINE"] = "1"
        if config.tensor_model_parallel_size > 1:
            wanted["SGLANG_CPU_OMP_THREADS_BIND"] = split_cores(config.tensor_model_parallel_size)
    return {name: value for name, value in wanted.items() if name not in os.environ}
