"""Attention over a prefix tree by variable-length kernels (`gather` and `merge` of `attention.py`), as one operator for
torch.compile: a tree that changes the selection compiles nothing. Keys are copied again in the backward pass instead of
saving the copies.
"""

from __future__ import annotations

from typing import Any

import torch

from verl.models.packing import Seqlens
from verl.models.shared_prefixes import TreeArguments


@torch.library.custom_op("verl::tree_attention", mutates_args=())
def tree_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    index: torch.Tensor,
    starts: torch.Tensor,
    sizes: torch.Tensor,
    scale: float,
    left: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention [T, heads, dim] and its log-sum-exp [heads, T]. `index`, `starts`, `sizes`: `TreeArguments`;
    `left`: window before a query, -1 without."""
    tree = TreeArguments(index, starts, sizes).parts()
    if left >= 0 or not tree.merges:
        if len(tree.path_keys) > len(key):
            key, value = (part.index_select(0, tree.path_keys) for part in (key, value))
        return kernel_forward(query, key, value, tree.path_seqlens, True, scale, left)
    out, lse = kernel_forward(query, key, value, tree.node_seqlens, True, scale)
    queries, keys = tree.prefix_queries, tree.prefix_keys
    parts = query.index_select(0, queries), key.index_select(0, keys), value.index_select(0, keys)
    prefix_out, prefix_lse = kernel_forward(*parts, tree.prefix_seqlens, False, scale)
    own_lse = lse.index_select(1, queries)
    # The weight of the prefix in the merged softmax is exp(prefix_lse) / (exp(prefix_lse) + exp(own_lse)).
    weight = torch.sigmoid(prefix_lse - own_lse).transpose(0, 1)[..., None]
    merged = torch.lerp(out.index_select(0, queries).to(weight.dtype), prefix_out.to(weight.dtype), weight)
    out = out.index_copy(0, queries, merged.to(out.dtype))
    return out, lse.index_copy(1, queries, torch.logaddexp(own_lse, prefix_lse))


@tree_kernel.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> Any:
    wide = torch.promote_types(query.dtype, torch.float32)
    return torch.empty_like(query), query.new_empty((query.shape[1], query.shape[0]), dtype=wide)


@torch.library.custom_op("verl::tree_attention_backward", mutates_args=())
def tree_kernel_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    index: torch.Tensor,
    starts: torch.Tensor,
    sizes: torch.Tensor,
    scale: float,
    left: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value. Those of shared tokens are summed in float32 or wider.

    With the log-sum-exp and the output of the whole row, the backward kernel of a part of the keys computes exactly the
    part's share of the gradients: P = exp(S - lse) and dS = P (dP - rowsum(dO O)) hold per key.
    """
    tree = TreeArguments(index, starts, sizes).parts()
    wide = torch.promote_types(query.dtype, torch.float32)
    if left >= 0 or not tree.merges:
        seqlens, keys = tree.path_seqlens, tree.path_keys
        if len(keys) == len(key):  # nothing is shared
            return kernel_backward(gradient, query, key, value, out, lse, seqlens, True, scale, left)
        copies = key.index_select(0, keys), value.index_select(0, keys)
        dq, *of_copies = kernel_backward(gradient, query, copies[0], copies[1], out, lse, seqlens, True, scale, left)
        dk, dv = (
            torch.zeros_like(key, dtype=wide).index_add_(0, keys, part.to(wide)).to(key.dtype) for part in of_copies
        )
        return dq, dk, dv
    queries, keys = tree.prefix_queries, tree.prefix_keys
    gradients = kernel_backward(gradient, query, key, value, out, lse, tree.node_seqlens, True, scale)
    prefix_gradients = kernel_backward(
        gradient.index_select(0, queries),
        query.index_select(0, queries),
        key.index_select(0, keys),
        value.index_select(0, keys),
        out.index_select(0, queries),
        lse.index_select(1, queries),
        tree.prefix_seqlens,
        False,
        scale,
    )
    dq, dk, dv = (
        whole.to(wide).index_add_(0, tokens, part.to(wide)).to(whole.dtype)
        for whole, part, tokens in zip(gradients, prefix_gradients, (queries, keys, keys), strict=True)
    )
    return dq, dk, dv


@tree_kernel_backward.register_fake
def _(gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> Any:
    return tuple(torch.empty_like(part) for part in (query, key, value))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.scale, ctx.left = inputs
    ctx.save_for_backward(*tensors, *output)


def _tree_gradients(ctx: Any, gradient: torch.Tensor, _: torch.Tensor | None) -> tuple[Any, ...]:
    query, key, value, *tree, out, lse = ctx.saved_tensors
    gradients = tree_kernel_backward(gradient.contiguous(), query, key, value, out, lse, *tree, ctx.scale, ctx.left)
    return *gradients, None, None, None, None, None


tree_kernel.register_autograd(_tree_gradients, setup_context=_save_for_backward)


def kernel_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seqlens: Seqlens,
    causal: bool,
    scale: float,
    left: int = -1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention [n, heads, dim] and its log-sum-exp [heads, n]; `left`: window before a query, -1 without."""
    result = torch.ops.aten._flash_attention_forward(
        query, key, value, *seqlens, 0.0, causal and left < 0, False, scale=scale, **_window(left)
    )
    return result[0], result[1]


def kernel_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    seqlens: Seqlens,
    causal: bool,
    scale: float,
    left: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value."""
    rng_state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # unused: there is no dropout
    unused = torch.empty(0, device=query.device)
    return torch.ops.aten._flash_attention_backward(
        gradient,
        query,
        key,
        value,
        out,
        lse,
        *seqlens,
        0.0,
        causal and left < 0,
        rng_state,
        unused,
        scale=scale,
        **_window(left),
    )


def _window(left: int) -> dict[str, int]:
    """Arguments of the kernels for a causal window."""
    return {} if left < 0 else {"window_size_left": left, "window_size_right": 0}
