"""Low-rank products of LoRA adapters, added inside the kernels between the matmuls of a decoder layer.

A separate product per matmul would be one more kernel of a few microseconds, 112 times per step of a model with 28
layers. Here the kernels of the rotation and the gate add the product to the tile that they read anyway, in float32. The
residual and its norm become two kernels, of which the first adds the product. Columns of `inner` (slots * layers *
rank) that belong to other layers of the same matmul are not read. Without adapters `verl.inference.kernels.pointwise`
is used.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
import triton
import triton.language as tl

from verl.inference.low_rank import LowRankProduct

__all__ = ["add_to_residual", "gated_silu", "is_fused", "rotate_and_cache"]

# With more columns of `inner` per layer (slots * rank), one matmul is faster than small products in each tile.
_MAX_INNER_COLUMNS = 128


def is_fused(product: LowRankProduct | None, layers: int) -> TypeGuard[LowRankProduct]:
    """Whether the kernels of this module can add `product` to the output of a matmul that computes `layers` layers."""
    if product is None or product.layers != layers:  # some of the layers have no adapter
        return False
    return product.up.shape[1] <= _MAX_INNER_COLUMNS * layers


def add_to_residual(x: torch.Tensor, residual: torch.Tensor, product: LowRankProduct) -> None:
    """Add `x` + `product` to `residual` [tokens, hidden] in place. Rows of `x` may be strided."""
    tokens, size = residual.shape
    rows, block = _rows_per_program(tokens), 64
    _add_to_residual[(triton.cdiv(size, block), triton.cdiv(tokens, rows))](
        x, residual, *_operands(product), x.stride(0), product.inner.stride(0), tokens, size,
        ROWS=rows, BLOCK=block, num_warps=4, **_sizes(product),
    )  # fmt: skip


def gated_silu(gate_up: torch.Tensor, product: LowRankProduct) -> torch.Tensor:
    """silu(gate) * up of `gate_up` + `product` [tokens, 2 * size] → [tokens, size]."""
    tokens, width = gate_up.shape
    size = width // 2
    out = gate_up.new_empty(tokens, size)
    rows, block = _rows_per_program(tokens), 64
    _gated_silu[(triton.cdiv(size, block), triton.cdiv(tokens, rows))](
        gate_up, out, *_operands(product), gate_up.stride(0), product.inner.stride(0), tokens, size,
        ROWS=rows, BLOCK=block, num_warps=4, **_sizes(product),
    )  # fmt: skip
    return out


def rotate_and_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    rotary: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    product: LowRankProduct,
) -> None:
    """`pointwise.rotate_and_cache` of `qkv` + `product`; the queries of `qkv` are replaced."""
    tokens, (kv_heads, dim) = len(qkv), keys.shape[2:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    query_norm, key_norm, eps = norms or (rotary, rotary, 0.0)
    rows = 16
    _rotate_and_cache[(heads + 2 * kv_heads, triton.cdiv(tokens, rows))](
        qkv, positions, rotary, slots, keys, values, query_norm, key_norm, *_operands(product),
        qkv.stride(0), product.inner.stride(0), tokens, eps,
        HEADS=heads, KV=kv_heads, DIM=dim, HAS_NORM=norms is not None, ROWS=rows, num_warps=4, **_sizes(product),
    )  # fmt: skip


def _rows_per_program(tokens: int) -> int:
    """Few rows in small steps, so that all multiprocessors have work; more rows read each matrix less often."""
    return 16 if tokens <= 128 else 64


def _operands(product: LowRankProduct) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return product.inner, product.up, product.inner if product.unused is None else product.unused


def _sizes(product: LowRankProduct) -> dict[str, Any]:
    rank = product.up.shape[1] // (product.slots * product.layers)
    # Columns of the operands that are loaded at once; at least 16 for `tl.dot`.
    block = next(block for block in (64, 32, 16) if rank % block == 0 or block == 16)
    return {"SLOTS": product.slots, "RANK": rank, "RANK_BLOCK": block, "SELECTS": product.unused is not None}


@triton.jit
def _load_adapted(
    x_ptr, x_stride, inner_ptr, inner_stride, up_ptr, unused_ptr, row, row_inside, column, column_inside, layer,
    LAYERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, SELECTS: tl.constexpr,
):  # fmt: skip
    """The tile `row` × `column` of x + inner @ up.T in float32, rounded to the type of x like a matmul's output.

    All columns belong to one layer. SELECTS: a row only uses the slots that are not `unused`.
    """
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for slot in tl.static_range(SLOTS):
        uses = row_inside
        if SELECTS:
            # Unused values are not loaded: an adapter whose products overflow would make the rows of others NaN.
            uses = uses & (tl.load(unused_ptr + row * SLOTS + slot, row_inside, 1) == 0)
        for start in tl.static_range(0, RANK, RANK_BLOCK):
            inside = start + tl.arange(0, RANK_BLOCK) < RANK
            index = (slot * LAYERS + layer) * RANK + start + tl.arange(0, RANK_BLOCK)
            left = tl.load(inner_ptr + row[:, None] * inner_stride + index[None, :], uses[:, None] & inside, 0.0)
            right = tl.load(
                up_ptr + column[None, :] * (SLOTS * LAYERS * RANK) + index[:, None],
                column_inside[None, :] & inside[:, None], 0.0,
            )  # fmt: skip
            product = tl.dot(left, right, product, input_precision="ieee")
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], row_inside[:, None] & column_inside[None, :], 0.0)
    return (x.to(tl.float32) + product).to(x.dtype).to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def _add_to_residual(
    x_ptr, residual_ptr, inner_ptr, up_ptr, unused_ptr, x_stride, inner_stride, tokens, size,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SLOTS: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, SELECTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row_inside, column_inside = row < tokens, column < size
    x = _load_adapted(
        x_ptr, x_stride, inner_ptr, inner_stride, up_ptr, unused_ptr, row, row_inside, column, column_inside, 0,
        1, ROWS, BLOCK, SLOTS, RANK, RANK_BLOCK, SELECTS,
    )  # fmt: skip
    inside = row_inside[:, None] & column_inside[None, :]
    place = residual_ptr + row[:, None] * size + column[None, :]
    residual = tl.load(place, inside, 0.0)
    tl.store(place, (residual.to(tl.float32) + x).to(residual.dtype), inside)


@triton.jit(do_not_specialize=["tokens"])
def _gated_silu(
    gate_up_ptr, out_ptr, inner_ptr, up_ptr, unused_ptr, stride, inner_stride, tokens, size,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SLOTS: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, SELECTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row_inside, column_inside = row < tokens, column < size
    gate = _load_adapted(
        gate_up_ptr, stride, inner_ptr, inner_stride, up_ptr, unused_ptr, row, row_inside, column, column_inside, 0,
        2, ROWS, BLOCK, SLOTS, RANK, RANK_BLOCK, SELECTS,
    )  # fmt: skip
    up = _load_adapted(
        gate_up_ptr, stride, inner_ptr, inner_stride, up_ptr, unused_ptr, row, row_inside, size + column, column_inside,
        1, 2, ROWS, BLOCK, SLOTS, RANK, RANK_BLOCK, SELECTS,
    )  # fmt: skip
    kind = out_ptr.dtype.element_ty
    active = (gate / (1.0 + tl.exp(-gate))).to(kind)
    inside = row_inside[:, None] & column_inside[None, :]
    tl.store(out_ptr + row[:, None] * size + column[None, :], active * up.to(kind), inside)


@triton.jit(do_not_specialize=["tokens"])
def _rotate_and_cache(
    qkv_ptr, positions_ptr, rotary_ptr, slots_ptr, keys_ptr, values_ptr, query_norm_ptr, key_norm_ptr, inner_ptr,
    up_ptr, unused_ptr, stride, inner_stride, tokens, eps,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, HAS_NORM: tl.constexpr, ROWS: tl.constexpr,
    SLOTS: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, SELECTS: tl.constexpr,
):  # fmt: skip
    """One head of ROWS tokens: a query, a key or a value, in the order of the columns of qkv."""
    head = tl.program_id(0)
    layer = (head >= HEADS).to(tl.int32) + (head >= HEADS + KV).to(tl.int32)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < tokens
    half = tl.arange(0, DIM // 2)
    all_columns = half >= 0
    first = _load_adapted(
        qkv_ptr, stride, inner_ptr, inner_stride, up_ptr, unused_ptr, row, inside, head * DIM + half, all_columns,
        layer, 3, ROWS, DIM // 2, SLOTS, RANK, RANK_BLOCK, SELECTS,
    )  # fmt: skip
    second = _load_adapted(
        qkv_ptr, stride, inner_ptr, inner_stride, up_ptr, unused_ptr, row, inside, head * DIM + DIM // 2 + half,
        all_columns, layer, 3, ROWS, DIM // 2, SLOTS, RANK, RANK_BLOCK, SELECTS,
    )  # fmt: skip
    kind = qkv_ptr.dtype.element_ty
    if head < HEADS + KV:
        if HAS_NORM:
            scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DIM + eps)[:, None]
            norm_ptr = key_norm_ptr
            if head < HEADS:
                norm_ptr = query_norm_ptr
            first_norm = tl.load(norm_ptr + half).to(tl.float32)[None, :]
            second_norm = tl.load(norm_ptr + DIM // 2 + half).to(tl.float32)[None, :]
            first = first_norm * (first * scale).to(kind).to(tl.float32)
            second = second_norm * (second * scale).to(kind).to(tl.float32)
        position = tl.load(positions_ptr + row, inside, 0)
        cos = tl.load(rotary_ptr + position[:, None] * DIM + half[None, :])
        sin = tl.load(rotary_ptr + position[:, None] * DIM + DIM // 2 + half[None, :])
        unrotated = first
        first = first * cos - second * sin
        second = second * cos + unrotated * sin
    if head < HEADS:
        place = qkv_ptr + row[:, None] * stride + head * DIM + half[None, :]
        tl.store(place, first.to(kind), inside[:, None])
        tl.store(place + DIM // 2, second.to(kind), inside[:, None])
    else:
        entry = tl.load(slots_ptr + row, inside, 0) * KV * DIM
        place = keys_ptr + entry[:, None] + (head - HEADS) * DIM + half[None, :]
        if head >= HEADS + KV:
            place = values_ptr + entry[:, None] + (head - HEADS - KV) * DIM + half[None, :]
        tl.store(place, first.to(kind), inside[:, None])
        tl.store(place + DIM // 2, second.to(kind), inside[:, None])
