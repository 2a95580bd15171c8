"""The operations between the matmuls of a decoder layer, one kernel each: add-and-norm, rotary-and-cache, gate."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear

from verl.inference.kernels import lora
from verl.inference.low_rank import LowRankProduct

__all__ = ["add_rms_norm", "gated_silu", "linear", "rms_norm", "rotate_and_cache", "write_cache"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x` [tokens, hidden] over its root mean square, times `weight` [hidden]."""
    out = torch.empty_like(x)
    size = x.shape[1]
    _add_rms_norm[(x.shape[0],)](
        x, x, weight, out, x.stride(0), size, eps, HAS_RESIDUAL=False, BLOCK=triton.next_power_of_2(size), num_warps=4
    )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, adapters: LowRankProduct | None = None
) -> torch.Tensor:
    """Add `x` to `residual` [tokens, hidden] in place; return the `rms_norm` of the sum. Rows of `x` may be strided.

    The product of `adapters` is added to `x`.
    """
    if lora.is_fused(adapters, layers=1):
        lora.add_to_residual(x, residual, adapters)
        return rms_norm(residual, weight, eps)
    if adapters is not None:
        adapters.add_to_(x)
    out = torch.empty_like(residual)
    size = x.shape[1]
    _add_rms_norm[(x.shape[0],)](
        x,
        residual,
        weight,
        out,
        x.stride(0),
        size,
        eps,
        HAS_RESIDUAL=True,
        BLOCK=triton.next_power_of_2(size),
        num_warps=4,
    )
    return out


def gated_silu(gate_up: torch.Tensor, adapters: LowRankProduct | None = None) -> torch.Tensor:
    """silu(gate) * up of `gate_up` [tokens, 2 * size], whose rows may be strided → [tokens, size].

    The product of `adapters` is added first.
    """
    if lora.is_fused(adapters, layers=2):
        return lora.gated_silu(gate_up, adapters)
    if adapters is not None:
        adapters.add_to_(gate_up)
    tokens, width = gate_up.shape
    size = width // 2
    out = gate_up.new_empty(tokens, size)
    block = 1024
    _gated_silu[(tokens, triton.cdiv(size, block))](gate_up, out, gate_up.stride(0), size, BLOCK=block, num_warps=4)
    return out


def rotate_and_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    rotary: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    adapters: LowRankProduct | None = None,
) -> None:
    """Rotate the queries of `qkv` [tokens, (heads + 2 kv) * dim] in place; write rotated keys and values to the cache.
    Rows of `qkv` may be strided.

    `rotary` [length, dim] float32: cos (first half of a row) and sin. `slots` [tokens]: index of each token's entry in
    `keys`, `values` [blocks, block, kv, dim]. `norms`: query and key weights [dim] and eps (Qwen3). The product of
    `adapters` is added to `qkv` first.
    """
    if lora.is_fused(adapters, layers=3):
        lora.rotate_and_cache(qkv, positions, rotary, slots, keys, values, norms, adapters)
        return
    if adapters is not None:
        adapters.add_to_(qkv)
    kv_heads, dim = keys.shape[2], keys.shape[3]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    query_norm, key_norm, eps = norms or (rotary, rotary, 0.0)
    _rotate_and_cache[(qkv.shape[0],)](
        qkv, positions, rotary, slots, keys, values, query_norm, key_norm, qkv.stride(0), eps,
        HEADS=heads, KV=kv_heads, DIM=dim, HAS_NORM=norms is not None,
        HEADS_BLOCK=triton.next_power_of_2(heads), KV_BLOCK=triton.next_power_of_2(kv_heads), num_warps=4,
    )  # fmt: skip


def write_cache(
    key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Write `key`, `value` [tokens, kv, dim] to `keys`, `values` [blocks, block, kv, dim] at `slots` [tokens]."""
    width = keys.shape[2] * keys.shape[3]
    _write_cache[(key.shape[0],)](
        key, value, slots, keys, values, key.stride(0), value.stride(0),
        WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip


@triton.jit
def _add_rms_norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, x_stride, size, eps, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    inside = column < size
    x = tl.load(x_ptr + tl.program_id(0).to(tl.int64) * x_stride + column, inside, 0.0)
    if HAS_RESIDUAL:
        # Rounded to the model's type before the norm, like in the unfused model.
        x = (x.to(tl.float32) + tl.load(residual_ptr + row + column, inside, 0.0).to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + row + column, x, inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    normed = (wide * scale).to(x.dtype)
    weight = tl.load(weight_ptr + column, inside, 0.0)
    tl.store(out_ptr + row + column, (weight * normed).to(x.dtype), inside)


@triton.jit
def _gated_silu(gate_up_ptr, out_ptr, stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up_ptr + row * stride + column, inside, 0.0)
    up = tl.load(gate_up_ptr + row * stride + size + column, inside, 0.0)
    wide = gate.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out_ptr + row * size + column, active * up, inside)


@triton.jit
def _rotate(base, head, inside, cos, sin, norm_ptr, eps, HAS_NORM: tl.constexpr, DIM: tl.constexpr):
    """Load the heads `head` of one token, normalise them if HAS_NORM, rotate them; return both halves in float32."""
    half = tl.arange(0, DIM // 2)
    first = tl.load(base + head[:, None] * DIM + half[None, :], inside[:, None], 0.0)
    second = tl.load(base + head[:, None] * DIM + DIM // 2 + half[None, :], inside[:, None], 0.0)
    kind = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DIM + eps)[:, None]
        first = tl.load(norm_ptr + half).to(tl.float32)[None, :] * (first * scale).to(kind).to(tl.float32)
        second = tl.load(norm_ptr + DIM // 2 + half).to(tl.float32)[None, :] * (second * scale).to(kind).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _rotate_and_cache(
    qkv_ptr, positions_ptr, rotary_ptr, slots_ptr, keys_ptr, values_ptr, query_norm_ptr, key_norm_ptr, stride, eps,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, HAS_NORM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    query = qkv_ptr + token * stride
    position = tl.load(positions_ptr + token)
    half = tl.arange(0, DIM // 2)
    cos = tl.load(rotary_ptr + position * DIM + half)[None, :]
    sin = tl.load(rotary_ptr + position * DIM + DIM // 2 + half)[None, :]
    kind = qkv_ptr.dtype.element_ty

    head = tl.arange(0, HEADS_BLOCK)
    inside = head < HEADS
    first, second = _rotate(query, head, inside, cos, sin, query_norm_ptr, eps, HAS_NORM, DIM)
    tl.store(query + head[:, None] * DIM + half[None, :], first.to(kind), inside[:, None])
    tl.store(query + head[:, None] * DIM + DIM // 2 + half[None, :], second.to(kind), inside[:, None])

    head = tl.arange(0, KV_BLOCK)
    inside = head < KV
    first, second = _rotate(query + HEADS * DIM, head, inside, cos, sin, key_norm_ptr, eps, HAS_NORM, DIM)
    entry = tl.load(slots_ptr + token) * KV * DIM
    tl.store(keys_ptr + entry + head[:, None] * DIM + half[None, :], first.to(kind), inside[:, None])
    tl.store(keys_ptr + entry + head[:, None] * DIM + DIM // 2 + half[None, :], second.to(kind), inside[:, None])
    whole = tl.arange(0, DIM)
    value = tl.load(query + (HEADS + KV) * DIM + head[:, None] * DIM + whole[None, :], inside[:, None], 0.0)
    tl.store(values_ptr + entry + head[:, None] * DIM + whole[None, :], value, inside[:, None])


@triton.jit
def _write_cache(
    key_ptr, value_ptr, slots_ptr, keys_ptr, values_ptr, key_stride, value_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    entry = tl.load(slots_ptr + token) * WIDTH
    tl.store(keys_ptr + entry + column, tl.load(key_ptr + token * key_stride + column, inside), inside)
    tl.store(values_ptr + entry + column, tl.load(value_ptr + token * value_stride + column, inside), inside)
