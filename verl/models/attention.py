"""Attention over packed sequences, registered with transformers' attention interface.

After `use_packed_attention(model)` the model must be called with `packing=…`, which its layers pass to attention.
"""

from __future__ import annotations

from typing import Any

import torch

from verl.models.attention_kernels import grouped_attention, has_kernel, kernel_attention
from verl.models.packing import Packing
from verl.models.shared_prefixes import TreePacking
from verl.models.tree_attention import tree_attention

PACKED = "verl_packed"
_LAYER_TYPES = {"full_attention", "sliding_attention"}


def use_packed_attention(model: Any) -> None:
    """Switch a Hugging Face model to packed attention; every forward pass then needs `packing=…`."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, packed_attention)
    model.set_attn_implementation(PACKED)


def packed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    packing: Packing | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function of transformers' interface: query [1, heads, T, dim] -> [1, T, heads, dim]."""
    if packing is None:
        raise ValueError(
            f"packing: {type(module).__name__} called packed attention without this argument. Pass packing=... to"
            " the model's forward; its layers must pass it on to the attention function."
        )
    if dropout:
        raise ValueError(
            "model.override_config: packed attention has no dropout. Set it to 0, or set "
            "model.use_remove_padding=False."
        )
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(query, key, value, packing, scale, sliding_window, softcap)[None], None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention within each sequence (or along each path of the tree) of `packing`, with the fastest
    implementation for these tensors.

    query [T, heads, dim], key, value [T, kv heads, dim] -> [T, heads, dim]. T: all tokens; with sequence parallelism,
    those of this rank.
    """
    parallel = packing.sequence_parallel
    if parallel is not None:
        query, key, value = parallel.exchange(query, key, value)
    if isinstance(packing, TreePacking):
        out = tree_attention(query, key, value, packing, scale, window, softcap)
    else:
        implementation = kernel_attention if has_kernel(query, value, softcap) else grouped_attention
        out = implementation(query, key, value, packing, scale, window, softcap)
    return out if parallel is None else parallel.restore(out)


def unsupported_layers(model: Any, config: Any) -> str | None:
    """Return why packed attention cannot be used with this Hugging Face model, or None.

    `config`: that of its language model.
    """
    if not model.is_backend_compatible():
        return "it does not use transformers' attention interface"
    unknown = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    return f"it has layers of type {', '.join(sorted(unknown))}" if unknown else None


def window_mismatch(config: Any, windows: list[int | None]) -> str | None:
    """Return a description of the first layer whose attention was called with a sliding window although its type in
    `config` has none, or without one although its type has one; None if there is none.

    `windows`: the `sliding_window` argument of each layer's attention call.
    """
    types = getattr(config, "layer_types", None)
    if types is None:
        windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
        types = ["sliding_attention" if windowed else "full_attention"] * len(windows)
    for layer, (layer_type, window) in enumerate(zip(types, windows, strict=True)):
        if (layer_type == "sliding_attention") != (window is not None):
            return f"layer {layer} has type {layer_type}, but its attention is called with sliding_window={window}"
    return None
