"""Products with a layer's weights where cuBLAS has no good tile: few rows, split along the inner size, gate applied."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["tiled"]


def tiled(
    x: torch.Tensor, weights: list[torch.Tensor], tile: tuple[int, ...], out: torch.Tensor, gate: bool
) -> Callable[[int], None]:
    height, width, depth, splits, warps, stages = tile
    rows, inner = x.shape
    columns = len(weights[0]) // (2 if gate else 1)
    left = TensorDescriptor.from_tensor(x, [height, depth])
    rights = [TensorDescriptor.from_tensor(weight, [width, depth]) for weight in weights]
    tiles = triton.cdiv(rows, height) * triton.cdiv(columns, width)
    sizes = {"ROWS": height, "WIDTH": width, "INNER": depth, "num_warps": warps, "num_stages": stages}

    def run(index: int) -> None:
        if gate:
            _matmul_gate[(tiles,)](left, rights[index], out, rows, columns, inner, **sizes)
        else:
            _matmul[(tiles, splits)](left, rights[index], out, rows, columns, inner, SPLITS=splits, **sizes)

    return run


@triton.jit
def _matmul(
    x, weight, out_ptr, rows, width, inner,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """x [rows, inner] @ weight [width, inner].T → [SPLITS, rows, width]: each split has a part of the inner size."""
    row_tiles = tl.cdiv(rows, ROWS)
    tile, split = tl.program_id(0), tl.program_id(1)
    row, column = tile % row_tiles * ROWS, tile // row_tiles * WIDTH
    steps = tl.cdiv(tl.cdiv(inner, INNER), SPLITS)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for step in range(split * steps, tl.minimum(split * steps + steps, tl.cdiv(inner, INNER))):
        left = x.load([row, step * INNER])
        right = weight.load([column, step * INNER])
        total = tl.dot(left, right.T, total)
    at_row = row + tl.arange(0, ROWS)
    at_column = column + tl.arange(0, WIDTH)
    at = out_ptr + (split * rows + at_row).to(tl.int64)[:, None] * width + at_column[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), (at_row < rows)[:, None] & (at_column < width)[None, :])


@triton.jit
def _matmul_gate(
    x, weight, out_ptr, rows, width, inner, ROWS: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr
):  # fmt: skip
    """silu(x @ gate.T) * (x @ up.T), `weight` [2 * width, inner] being gate, then up → [rows, width]."""
    row_tiles = tl.cdiv(rows, ROWS)
    tile = tl.program_id(0)
    row, column = tile % row_tiles * ROWS, tile // row_tiles * WIDTH
    gate = tl.zeros([ROWS, WIDTH], tl.float32)
    up = tl.zeros([ROWS, WIDTH], tl.float32)
    for step in range(tl.cdiv(inner, INNER)):
        left = x.load([row, step * INNER])
        gate = tl.dot(left, weight.load([column, step * INNER]).T, gate)
        up = tl.dot(left, weight.load([width + column, step * INNER]).T, up)
    kind = out_ptr.dtype.element_ty
    gate = gate.to(kind).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(kind)
    at_row = row + tl.arange(0, ROWS)
    at_column = column + tl.arange(0, WIDTH)
    at = out_ptr + at_row.to(tl.int64)[:, None] * width + at_column[None, :]
    tl.store(at, active * up.to(kind), (at_row < rows)[:, None] & (at_column < width)[None, :])
