"""The engines that the suite tests, with their settings for a small CPU machine. Tests do not depend on the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

__all__ = ["ENGINES", "MODELS", "EngineRow", "installed"]


@dataclass(frozen=True)
class EngineRow:
    """A column of the table that the suite prints."""

    package: str = ""
    """The package that must be installed; "" for engines of verl."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `actor_rollout_ref.rollout` that it needs on a small CPU machine."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the process, set before the engine is imported."""
    cannot: Mapping[str, str] = field(default_factory=dict)
    """Reasons why the engine does not support a feature, by the name that tests use for it."""
    shims_for: str = ""
    """A package that is replaced by tests/engines/shims if it is not installed."""


ENGINES = {
    "native": EngineRow(
        cannot={
            "tensor parallel": "its ranks are worker processes, tested in tests/distributed",
            "server": "a run cannot connect to a server of this engine",
        }
    ),
    "hf": EngineRow(
        cannot={
            "tensor parallel": "runs on one device",
            "details": "has no penalties, logit biases and top log-probs",
            "arguments": "has no engine arguments",
            "prefix cache": "has no prefix cache",
            "server": "has no server",
            "experts": "does not return routed experts",
        }
    ),
    "vllm": EngineRow(package="vllm", keys={"engine_kwargs": {"vllm": {"num_gpu_blocks_override": 256}}}),
    "sglang": EngineRow(
        package="sglang",
        keys={"engine_kwargs": {"sglang": {"max_total_tokens": 8192}}},
        shims_for="sgl_kernel",
        cannot={
            "seeds": "seeds a request only with enable_deterministic_inference, which has no CPU kernels",
            "experts": "does not return routed experts",
        },
    ),
}


# Head size 32, the smallest of vLLM's CPU kernels.
TINY = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    "plain": TINY,
    "tied": {**TINY, "tie_word_embeddings": True},
    "wide": {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128},
    "experts": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "family": "qwen3_moe",
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
    },
}


def installed() -> list[str]:
    """Return the names of the engines that can run on this machine."""
    return [name for name, row in ENGINES.items() if not row.package or find_spec(row.package) is not None]
