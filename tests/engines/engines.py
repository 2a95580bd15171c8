"""The engines that the suite runs on, and what each is given on a machine like this one. Tests know no engine."""

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
    """What must be importable; "" for ours."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `actor_rollout_ref.rollout` that it needs on a small CPU machine."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of the process, before the engine is imported."""
    cannot: Mapping[str, str] = field(default_factory=dict)
    """What it does not do, by the name that a test asks for, and why."""
    shims_for: str = ""
    """A package without which it runs here with what is in tests/engines/shims."""


ENGINES = {
    "native": EngineRow(
        cannot={
            "tensor parallel": "its ranks are the workers': tests/distributed",
            "server": "is joined by no run",
        }
    ),
    "hf": EngineRow(
        cannot={
            "tensor parallel": "runs on one device",
            "details": "no penalties, biases and log-probs of other tokens",
            "arguments": "takes none",
            "prefix cache": "has none",
            "server": "has none",
            "experts": "does not say them",
        }
    ),
    "vllm": EngineRow(package="vllm", keys={"engine_kwargs": {"vllm": {"num_gpu_blocks_override": 256}}}),
    "sglang": EngineRow(
        package="sglang",
        keys={"engine_kwargs": {"sglang": {"max_total_tokens": 8192}}},
        shims_for="sgl_kernel",
        cannot={
            "seeds": "seeds a request only with enable_deterministic_inference, which has no CPU kernels",
            "experts": "does not say them",
        },
    ),
}


# Heads of 32: vLLM's CPU kernels have none smaller.
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
    """Those that can run here."""
    return [name for name, row in ENGINES.items() if not row.package or find_spec(row.package) is not None]
