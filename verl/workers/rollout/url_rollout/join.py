"""Find out what runs at a URL, and whether it can serve this run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from verl.config import RolloutConfig
from verl.workers.rollout.url_rollout.server import Server, ServerError
from verl.workers.rollout.url_rollout.streams import Dialect
from verl.workers.rollout.url_rollout.vllm_dialect import VllmDialect
from verl.workers.rollout.url_rollout.vllm_weights import VllmLine
from verl.workers.rollout.url_rollout.weights import WeightLine

__all__ = ["Joined", "join"]


@dataclass(frozen=True)
class Joined:
    """A server that was found fit."""

    engine: str
    """Name and version."""
    dialect: Dialect
    line: WeightLine
    dtype: torch.dtype
    after_truncation: bool
    """Its log-probs are those after top-k, top-p and min-p."""


def join(url: str, model_path: str, config: RolloutConfig, hf_config: Any, device: torch.device) -> Joined:
    """Raises ServerError, which names the URL, the cause and what to do."""
    server = Server(url)
    kind = "vllm" if server.knows("/version") else "something else"
    if config.name != kind:
        raise ServerError(f"rollout.server_urls: at {server.url} runs {kind}, and rollout.name is {config.name}.")
    if kind == "vllm":
        vllm = VllmDialect(server, model_path, config, hf_config)
        version = server.get("/version")["version"]
        return Joined(f"vLLM {version}", vllm, VllmLine(vllm, device), vllm.dtype, after_truncation=True)
    raise ServerError(f"rollout.server_urls: {server.url} is neither a vLLM nor an SGLang server.")
