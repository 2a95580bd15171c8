"""Attention over packed sequences and prefix trees, registered with transformers' attention interface.

After `use_packed_attention(model)` the model must be called with `packing=…`, which its layers pass to attention.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from verl.models.packing import Packing, Seqlens
from verl.models.prefix_support import MAX_HEAD_DIM
from verl.models.shared_prefixes import TreeArguments, TreePacking, gather_tokens

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None

# Newer versions of torch require this argument for grouped-query attention.
_VARLEN_HAS_GQA_ARGUMENT = "enable_gqa" in inspect.signature(varlen_attn).parameters
_HALF = (torch.float16, torch.bfloat16)

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
    """Causal attention within each sequence (or along each path of the prefix tree) of `packing`, with the fastest
    implementation for these tensors.

    query [T, heads, dim], key, value [T, kv heads, dim] -> [T, heads, dim]. T: all tokens; with sequence parallelism,
    those of this rank.
    """
    parallel = packing.sequence_parallel
    if parallel is not None:
        query, key, value = parallel.exchange(query, key, value)
    if isinstance(packing, TreePacking):
        out = tree_attention(query, key, value, packing, scale, window, softcap)
    elif has_kernel(query, value, softcap):
        out = varlen_attention(query, key, value, packing.seqlens, scale, window, softcap)
    else:
        out = grouped_attention(query, key, value, packing, scale, window, softcap)
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


# ---------------------------------------------------------------- sequences


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
    supported = query.dtype in _HALF and size == value.shape[-1] and size % 8 == 0 and size <= MAX_HEAD_DIM
    return query.is_cuda and supported and (flash_attn_varlen_func is not None or softcap is None)


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seqlens: Seqlens,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Causal attention of sequences whose queries are the last tokens of their keys; flash-attn's kernel if it is
    installed, otherwise torch's."""
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


# ---------------------------------------------------------------- prefix trees
#
# Every computed token attends to the tokens before it on its path. Implementations with the same result:
#
# - `gather`: one variable-length call; the keys of a node are a copy of its whole path.
# - `merge`: nodes attend to themselves, and to their shared tokens in a second call; the two parts are merged by their
#   log-sum-exp. Keys are not copied for each row.
# - expanded rows: attention of whole paths, in any dtype and on any device. Costs as much as attention without sharing.


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
        return expanded_attention(query, key, value, packing, scale, window, softcap)
    assert packing.kernel_arguments is not None
    if softcap is not None:  # only in flash-attn, which torch.compile does not look into
        parts = packing.kernel_arguments.parts()
        key, value = (gather_tokens(part, parts.path_keys) for part in (key, value))
        return varlen_attention(query, key, value, parts.path_seqlens, scale, window, softcap)
    query, key, value = (part.contiguous() for part in (query, key, value))
    return tree_kernel(query, key, value, *packing.kernel_arguments, scale, -1 if window is None else window - 1)[0]


def expanded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: TreePacking,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention within whole paths. Only the results of each row's own node are returned: [T, heads, dim]."""
    rows = packing.expanded
    query, key, value = (part.index_select(0, rows.tokens) for part in (query, key, value))
    return grouped_attention(query, key, value, rows.packing, scale, window, softcap).index_select(0, rows.own)


# Attention over a prefix tree is one operator for torch.compile: a tree that changes the selection compiles nothing.
# Keys are copied again in the backward pass instead of saving the copies.
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
    ctx.mark_non_differentiable(output[1])


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
