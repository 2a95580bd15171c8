"""Attention along the paths of a prefix tree: every computed token attends to the tokens before it on its path.

Implementations with the same result:

- `gather`: one variable-length call; a sequence's keys are a copy of its whole path.
- `merge`: sequences attend to themselves, and to their shared prefix in a second call; the two parts are merged by
  their log-sum-exp. Keys are not copied for each row.
- rows: attention of whole paths, in any dtype and on any device. Costs as much as attention without sharing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from verl.models.attention_kernels import grouped_attention, has_kernel, varlen_attention
from verl.models.shared_prefixes import Branches, TreePacking, gather_tokens


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: TreePacking,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """query [T, heads, dim], key, value [T, kv heads, dim] of the computed tokens -> [T, heads, dim]."""
    if not has_kernel(query, value, softcap):
        return rows_attention(query, key, value, packing, scale, window, softcap)
    if packing.branches is not None and window is None and softcap is None:
        return merged_attention(query, key, value, packing, packing.branches, scale)
    return gathered_attention(query, key, value, packing, scale, window, softcap)


def rows_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: TreePacking,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of whole paths, of which the tokens that a row contributes are kept."""
    rows = packing.expanded
    query, key, value = (part.index_select(0, rows.tokens) for part in (query, key, value))
    return grouped_attention(query, key, value, rows.packing, scale, window, softcap).index_select(0, rows.own)


# ---------------------------------------------------------------- gathered keys


def gathered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: TreePacking,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of every sequence to a copy of its path. The causal mask is aligned to the end of the keys."""
    gathered = packing.gathered
    assert gathered is not None
    key, value = (gather_tokens(part, gathered.keys) for part in (key, value))
    seqlens = (packing.cu_seqlens, gathered.cu_keys, packing.max_length, gathered.max_keys)
    return varlen_attention(query, key, value, seqlens, scale, window, softcap)


# ---------------------------------------------------------------- parts merged by log-sum-exp


def merged_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: TreePacking, branches: Branches, scale: float
) -> torch.Tensor:
    """Causal attention of each sequence to itself, merged with attention to its shared prefix."""
    query, key, value = (part.contiguous() for part in (query, key, value))
    own = (packing.cu_seqlens, packing.cu_seqlens, packing.max_length, packing.max_length)
    prefix = (branches.cu_queries, branches.cu_keys, branches.max_queries, branches.max_keys)
    return _MergedAttention.apply(query, key, value, branches.queries, branches.keys, own, prefix, scale)


class _MergedAttention(torch.autograd.Function):
    """With the log-sum-exp and the output of the whole row, the backward kernel of each part computes exactly the
    part's share of the gradients: P = exp(S - lse) and dS = P (dP - rowsum(dO O)) hold per key."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        own: tuple[torch.Tensor, torch.Tensor, int, int],
        prefix: tuple[torch.Tensor, torch.Tensor, int, int],
        scale: float,
    ) -> torch.Tensor:
        out, lse = kernel_forward(query, key, value, own, True, scale)
        parts = query.index_select(0, queries), key.index_select(0, keys), value.index_select(0, keys)
        prefix_out, prefix_lse = kernel_forward(*parts, prefix, False, scale)
        own_lse = lse.index_select(1, queries)
        # The weight of the prefix in the merged softmax is exp(prefix_lse) / (exp(prefix_lse) + exp(own_lse)).
        weight = torch.sigmoid(prefix_lse - own_lse).transpose(0, 1)[..., None]
        merged = torch.lerp(out.index_select(0, queries).to(weight.dtype), prefix_out.to(weight.dtype), weight)
        out = out.index_copy(0, queries, merged.to(out.dtype))
        lse = lse.index_copy(1, queries, torch.logaddexp(own_lse, prefix_lse))
        ctx.save_for_backward(query, key, value, out, lse, queries, keys, *own[:2], *prefix[:2])
        ctx.sizes, ctx.scale = (own[2:], prefix[2:]), scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, out, lse, queries, keys, *starts = ctx.saved_tensors
        own, prefix = (*starts[:2], *ctx.sizes[0]), (*starts[2:], *ctx.sizes[1])
        gradient = gradient.contiguous()
        gradients = kernel_backward(gradient, query, key, value, out, lse, own, True, ctx.scale)
        prefix_gradients = kernel_backward(
            gradient.index_select(0, queries),
            query.index_select(0, queries),
            key.index_select(0, keys),
            value.index_select(0, keys),
            out.index_select(0, queries),
            lse.index_select(1, queries),
            prefix,
            False,
            ctx.scale,
        )
        # Prefixes of a nested tree overlap: their gradients are summed in float32 or wider.
        wide = torch.promote_types(query.dtype, torch.float32)
        merged = [
            whole.to(wide).index_add_(0, index, part.to(wide)).to(whole.dtype)
            for whole, part, index in zip(gradients, prefix_gradients, (queries, keys, keys), strict=True)
        ]
        return *merged, None, None, None, None, None


def kernel_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seqlens: tuple[torch.Tensor, torch.Tensor, int, int],
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention [n, heads, dim] and its log-sum-exp [heads, n]."""
    result = torch.ops.aten._flash_attention_forward(query, key, value, *seqlens, 0.0, causal, False, scale=scale)
    return result[0], result[1]


def kernel_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    seqlens: tuple[torch.Tensor, torch.Tensor, int, int],
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value."""
    rng_state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # unused: there is no dropout
    unused = torch.empty(0, device=query.device)
    return torch.ops.aten._flash_attention_backward(
        gradient, query, key, value, out, lse, *seqlens, 0.0, causal, rng_state, unused, scale=scale
    )
