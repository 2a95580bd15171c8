"""Attention over packed sequences, under a name of its own in transformers' attention interface.

A model attends with it after `attend_packed(model)`, and is called with `packing=…`, which its layers hand on.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from verl.models.packing import Packing

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None

PACKED = "verl_packed"
# Fewer key than query heads: the kernel takes them in every version, newer ones want to be told.
_VARLEN_ASKS_TO_SHARE = "enable_gqa" in inspect.signature(varlen_attn).parameters
_HALF = (torch.float16, torch.bfloat16)
_FLASH_HEAD_LIMIT = 256
_LAYER_KINDS = {"full_attention", "sliding_attention"}


def attend_packed(model: Any) -> None:
    """From now on a Hugging Face `model` needs `packing=…` in every pass."""
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
    """What transformers calls in every layer: query [1, heads, T, dim] -> [1, T, heads, dim]."""
    if packing is None:
        raise ValueError(f"packing: {type(module).__name__} was called without it, or its model does not hand it on.")
    if dropout:
        raise ValueError(
            "model.override_config: attention has no dropout where padding is removed. "
            "Leave it at 0, or set model.use_remove_padding=False."
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
    """Causal attention within each sequence of `packing`, by the fastest way that takes these tensors.

    query [T, heads, dim], key, value [T, kv heads, dim] -> [T, heads, dim]. T are all tokens; where ranks share them,
    this rank's.
    """
    parallel = packing.sequence_parallel
    if parallel is not None:
        query, key, value = parallel.exchange(query, key, value)
    way = _kernel_attention if _has_kernel(query, value, softcap) else grouped_attention
    out = way(query, key, value, packing, scale, window, softcap)
    return out if parallel is None else parallel.restore(out)


def layers_objection(hf: Any, config: Any) -> str | None:
    """Why the layers of a Hugging Face model cannot attend by a function of ours, as its class and config say."""
    if not hf.is_backend_compatible():
        return "it does not attend through transformers' attention interface"
    strange = set(getattr(config, "layer_types", None) or ()) - _LAYER_KINDS
    return f"it has layers of the kind {', '.join(sorted(strange))}" if strange else None


def window_lost(config: Any, windows: list[int | None]) -> str | None:
    """A sliding window that the config has and the attention of some layer was not told of."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if windowed else "full_attention"] * len(windows)
    for layer, (kind, window) in enumerate(zip(kinds, windows, strict=True)):
        if (kind == "sliding_attention") != (window is not None):
            return f"layer {layer} is of the kind {kind}, but attention is told of window {window}"
    return None


def grouped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Exact in any dtype and on any device: one call per group of sequences of similar length.

    query [T, heads, dim], key, value [T, kv heads, dim] -> [T, heads, dim]. Padding follows its sequence, where causal
    attention does not look.
    """
    groups, home = packing.groups
    parts = []
    for group in groups:
        q, k, v = (
            _picked(part, group.tokens).unflatten(0, (-1, group.width)).transpose(1, 2) for part in (query, key, value)
        )
        parts.append(_rectangle(q, k, v, scale, window, softcap).transpose(1, 2).flatten(0, 1))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return _picked(out, home)


def _picked(values: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
    return values if places is None else values.index_select(0, places)


def _rectangle(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Causal attention of [sequences, heads, n, dim], every row whole."""
    width, share = query.shape[2], query.shape[1] // key.shape[1]
    if query.is_cuda and share > 1:  # the kernels for float32 there do not share heads
        key, value = (part.repeat_interleave(share, dim=1) for part in (key, value))
        share = 1
    if softcap is None:
        visible = None if window is None or window >= width else _visible(width, window, query.device)
        return F.scaled_dot_product_attention(
            query, key, value, visible, is_causal=visible is None, scale=scale, enable_gqa=share > 1
        )
    visible = _visible(width, window, query.device)
    shared = query.unflatten(1, (key.shape[1], share))
    scores = torch.tanh(shared @ key[:, :, None].transpose(-1, -2) * (scale / softcap)) * softcap
    weights = scores.where(visible, -torch.inf).softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value[:, :, None]).flatten(1, 2)


def _visible(width: int, window: int | None, device: torch.device) -> torch.Tensor:
    """[n, n]: which token each one looks at."""
    all_before = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    return all_before if window is None else all_before.triu(1 - window)


def _has_kernel(query: torch.Tensor, value: torch.Tensor, softcap: float | None) -> bool:
    """Whether a variable-length kernel takes these tensors; torch's own knows no soft-capping."""
    size = query.shape[-1]
    fits = query.dtype in _HALF and size == value.shape[-1] and size % 8 == 0 and size <= _FLASH_HEAD_LIMIT
    return query.is_cuda and fits and (flash_attn_varlen_func is not None or softcap is None)


def _kernel_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """By flash-attn's kernel where it is installed, else by torch's own."""
    before = -1 if window is None else window - 1
    where = (packing.cu_seqlens, packing.cu_seqlens, packing.max_length, packing.max_length)
    if flash_attn_varlen_func is not None:
        sides = (before, -1 if window is None else 0)
        return flash_attn_varlen_func(
            query, key, value, *where, softmax_scale=scale, causal=True, window_size=sides, softcap=softcap or 0.0
        )
    shares = {"enable_gqa": True} if _VARLEN_ASKS_TO_SHARE else {}
    query, key, value = (part.contiguous() for part in (query, key, value))
    return varlen_attn(query, key, value, *where, scale=scale, window_size=(before, 0), **shares)
