"""CUDA kernel of `weight_fingerprint`: the sums of many tensors in one launch."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

__all__ = ["sum_pieces"]

_BITS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


def sum_pieces(
    pieces: np.ndarray, tensors: int, high: torch.Tensor, low: torch.Tensor, width: int, block: int, blocks: int
) -> torch.Tensor:
    """Return int64 [tensors]: the fingerprints of tensors with elements of `width` bytes.

    `pieces`: int64 [5, pieces] as of `weight_fingerprint._pieces`, each with up to `blocks` blocks of `block` indices.
    `high` and `low` are the weights of blocks and of indices within a block.
    """
    sums = torch.zeros(tensors, dtype=torch.int64, device=high.device)
    count = pieces.shape[1]
    if count:
        table = torch.from_numpy(pieces).to(high.device)
        bits = _BITS[width]
        _sum_piece[(count,)](table, sums, high, low, count, BITS=bits, BLOCK=block, BLOCKS=blocks, num_warps=8)
    return sums


@triton.jit
def _sum_piece(
    table_ptr, sums_ptr, high_ptr, low_ptr, pieces, BITS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    piece = tl.program_id(0)
    address = tl.load(table_ptr + piece)
    start = tl.load(table_ptr + pieces + piece)
    end = tl.load(table_ptr + 2 * pieces + piece)
    owner = tl.load(table_ptr + 3 * pieces + piece)
    first = tl.load(table_ptr + 4 * pieces + piece)
    # Relative to the first index of the piece, which may lie before the run: elements outside are not read.
    values = address.to(tl.pointer_type(BITS)) + (first * BLOCK - start)
    left = tl.maximum(start - first * BLOCK, 0).to(tl.int32)
    right = tl.minimum(end - first * BLOCK, BLOCK * BLOCKS).to(tl.int32)
    columns = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.int64)
    for block in tl.static_range(BLOCKS):
        at = columns + block * BLOCK
        bits = tl.load(values + at, (at >= left) & (at < right), 0).to(tl.int64)
        total += bits * tl.load(high_ptr + first + block)
    tl.atomic_add(sums_ptr + owner, tl.sum(total * tl.load(low_ptr + columns), 0))
