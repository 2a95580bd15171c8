"""Find out what runs at a URL, and whether it can serve this run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from verl.config import RolloutConfig
from verl.workers.rollout.url_rollout.server import Server, ServerError
from verl.workers.rollout.url_rollout.sglang_dialect import SGLangDialect
from verl.workers.rollout.url_rollout.sglang_weights import SGLangLine
from verl.workers.rollout.url_rollout.vllm_dialect import VllmDialect
from verl.workers.rollout.url_rollout.vllm_weights import VllmLine

__all__ = ["Joined", "join"]


@dataclass(frozen=True)
class Joined:
    """A server that was found fit, and the way of the weights to it."""

    dialect: VllmDialect | SGLangDialect
    line: VllmLine | SGLangLine


def join(
    url: str, model_path: str, config: RolloutConfig, hf_config: Any, ends: frozenset[int], device: torch.device
) -> Joined:
    """Raises ServerError, which names the URL, the cause and what to do. `ends`: the model's own end tokens."""
    server = Server(url)
    kind = "sglang" if server.knows("/model_info") else "vllm" if server.knows("/version") else None
    if kind is None:
        raise ServerError(
            f"rollout.server_urls: {server.url} has neither /version, as vLLM has, nor /model_info, as SGLang has. Name"
            " the server itself, without a path such as /v1."
        )
    if config.name != kind:
        raise ServerError(
            f"rollout.server_urls: at {server.url} runs {kind}, and rollout.name is {config.name}. Set it to {kind}, or"
            " name another server."
        )
    try:
        if kind == "vllm":
            vllm = VllmDialect(server, model_path, config, hf_config)
            return Joined(vllm, VllmLine(vllm, device))
        sglang = SGLangDialect(server, model_path, config, hf_config, ends)
        return Joined(sglang, SGLangLine(sglang, device))
    except (LookupError, TypeError) as error:
        raise ServerError(
            f"rollout.server_urls: what {server.url} says of itself cannot be read ({type(error).__name__}: {error})."
            " docs/servers.md names the versions that were tried."
        ) from error
