"""The environment variables of a process that runs TensorRT-LLM; to be set before it is imported there."""

from __future__ import annotations

import os

import torch

from verl.config import RolloutConfig

__all__ = ["environment"]


def environment(config: RolloutConfig, device: torch.device | str) -> dict[str, str]:
    """Those that are not set already: what a user has set stays."""
    wanted = {
        "TLLM_LOG_LEVEL": "ERROR",
        # Its workers are processes of Ray: they must see the devices that they are given, and not choose by number.
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}
