"""Which models can compute common prefixes of rows only once (prefix trees) on a GPU. Imports no torch."""

from __future__ import annotations

from typing import Any

MAX_HEAD_DIM = 256
"""Largest dimension of a head that variable-length attention kernels support."""


def sharing_obstacle(config: Any) -> str | None:
    """Return why attention over prefix trees would need unbounded memory on a GPU; None if it does not.

    `config`: transformers configuration of the language model. Memory is bounded if attention to the prefix and to the
    row are two kernel calls, whose results are merged (see `verl.models.attention`). That is impossible with sliding
    windows and soft-capping: the other implementations copy the keys of the prefix for every row.
    """
    if _has_windows(config):
        return "layers with a sliding window copy the keys of every row"
    if getattr(config, "attn_logit_softcapping", None):
        return "attention with soft-capping copies the keys of every row"
    key_dim, value_dim = _head_dims(config)
    if key_dim != value_dim:
        return f"no kernel supports keys of {key_dim} and values of {value_dim} dimensions (latent attention)"
    if key_dim % 8 or key_dim > MAX_HEAD_DIM:
        return f"no kernel supports heads of {key_dim} dimensions"
    return None


def precision_obstacle(precision: str) -> str | None:
    """Return why a compute precision (bf16, fp16, fp32) excludes prefix trees on a GPU; None if it does not."""
    return "no kernel supports float32" if precision == "fp32" else None


def _has_windows(config: Any) -> bool:
    """Return whether a layer has a sliding window."""
    types = getattr(config, "layer_types", None)
    if types is not None:
        return "sliding_attention" in types
    return getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)


def _head_dims(config: Any) -> tuple[int, int]:
    """Return the dimensions of a head's keys (and queries) and of its values."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    nope_dim = getattr(config, "qk_nope_head_dim", None)  # latent attention: keys have parts without and with RoPE
    key_dim = nope_dim + config.qk_rope_head_dim if nope_dim is not None else head_dim
    return key_dim, getattr(config, "v_head_dim", None) or head_dim
