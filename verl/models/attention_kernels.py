"""Attention over packed sequences: variable-length kernels, and an exact implementation for any dtype and device."""

from __future__ import annotations

import inspect

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from verl.models.packing import Packing

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None

# Newer versions of torch require this argument for grouped-query attention.
_VARLEN_HAS_GQA_ARGUMENT = "enable_gqa" in inspect.signature(varlen_attn).parameters
_HALF = (torch.float16, torch.bfloat16)
_MAX_HEAD_DIM = 256


def grouped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Exact attention in any dtype and on any device: one call per group of sequences of similar length.

    query [T, heads, dim], key, value [T, kv heads, dim] -> [T, heads, dim]. Sequences are padded on the right, where
    causal attention ignores the padding.
    """
    groups, packed_index = packing.groups
    parts = []
    for group in groups:
        q, k, v = (
            _select(part, group.tokens).unflatten(0, (-1, group.width)).transpose(1, 2) for part in (query, key, value)
        )
        parts.append(_batched_attention(q, k, v, scale, window, softcap).transpose(1, 2).flatten(0, 1))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return _select(out, packed_index)


def _select(values: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    return values if index is None else values.index_select(0, index)


def _batched_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Causal attention of [sequences, heads, n, dim] without padding mask."""
    width, queries_per_key = query.shape[2], query.shape[1] // key.shape[1]
    if query.is_cuda and queries_per_key > 1:  # CUDA's float32 kernels do not support grouped-query attention
        key, value = (part.repeat_interleave(queries_per_key, dim=1) for part in (key, value))
        queries_per_key = 1
    if softcap is None:
        mask = None if window is None or window >= width else _causal_mask(width, window, query.device)
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=queries_per_key > 1
        )
    mask = _causal_mask(width, window, query.device)
    grouped = query.unflatten(1, (key.shape[1], queries_per_key))
    scores = torch.tanh(grouped @ key[:, :, None].transpose(-1, -2) * (scale / softcap)) * softcap
    weights = scores.where(mask, -torch.inf).softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value[:, :, None]).flatten(1, 2)


def _causal_mask(width: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return the causal mask [width, width], limited to the last `window` positions; True: attended to."""
    causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    return causal if window is None else causal.triu(1 - window)


def has_kernel(query: torch.Tensor, value: torch.Tensor, softcap: float | None) -> bool:
    """Whether a variable-length kernel supports these tensors; torch's kernel does not support soft-capping."""
    size = query.shape[-1]
    supported = query.dtype in _HALF and size == value.shape[-1] and size % 8 == 0 and size <= _MAX_HEAD_DIM
    return query.is_cuda and supported and (flash_attn_varlen_func is not None or softcap is None)


def kernel_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention within each sequence of `packing`, with a variable-length kernel."""
    seqlens = (packing.cu_seqlens, packing.cu_seqlens, packing.max_length, packing.max_length)
    return varlen_attention(query, key, value, seqlens, scale, window, softcap)


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seqlens: tuple[torch.Tensor, torch.Tensor, int, int],
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Causal attention of sequences whose queries are the last tokens of their keys; flash-attn's kernel if it is
    installed, otherwise torch's.

    `seqlens`: starts of the queries and of the keys of each sequence, int32 [S + 1], and the largest number of each.
    """
    left = -1 if window is None else window - 1
    if flash_attn_varlen_func is not None:
        window_size = (left, -1 if window is None else 0)
        return flash_attn_varlen_func(
            query,
            key,
            value,
            *seqlens,
            softmax_scale=scale,
            causal=True,
            window_size=window_size,
            softcap=softcap or 0.0,
        )
    gqa = {"enable_gqa": True} if _VARLEN_HAS_GQA_ARGUMENT else {}
    query, key, value = (part.contiguous() for part in (query, key, value))
    return varlen_attn(query, key, value, *seqlens, scale=scale, window_size=(left, 0), **gqa)
