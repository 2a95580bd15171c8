"""Which models can share prefixes on a GPU: those with a kernel of bounded memory for it. Imports no torch."""

from __future__ import annotations

from typing import Any

MAX_HEAD_DIM = 256
"""Of variable-length kernels."""


def sharing_obstacle(config: Any) -> str | None:
    """Return why attention over prefix trees has no kernel with bounded memory on a GPU, or None.

    `config`: of the language model, as transformers reads it. Windows and soft-capping exclude the implementation that
    merges two calls (see `verl.models.attention`); the others copy the keys of every row, without a limit.
    """
    if _has_windows(config):
        return "layers with a sliding window copy the keys of every row"
    if getattr(config, "attn_logit_softcapping", None):
        return "attention with soft-capping copies the keys of every row"
    query, value = _head_dims(config)
    if query != value:
        return f"no kernel supports keys of {query} and values of {value} dimensions (latent attention)"
    if query % 8 or query > MAX_HEAD_DIM:
        return f"no kernel supports heads of {query} dimensions"
    return None


def precision_obstacle(precision: str) -> str | None:
    """Return why a compute precision (bf16, fp16, fp32) excludes sharing on a GPU, or None."""
    return "no kernel supports float32" if precision == "fp32" else None


def _has_windows(config: Any) -> bool:
    types = getattr(config, "layer_types", None)
    if types is not None:
        return "sliding_attention" in types
    return getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)


def _head_dims(config: Any) -> tuple[int, int]:
    """Return the dimensions of a head's keys and values."""
    usual = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    latent = getattr(config, "qk_nope_head_dim", None)
    query = latent + config.qk_rope_head_dim if latent is not None else usual
    return query, getattr(config, "v_head_dim", None) or usual
