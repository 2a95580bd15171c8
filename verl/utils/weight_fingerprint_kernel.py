"""CUDA kernel of `weight_fingerprint`: the sums of many tensors in one launch."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

__all__ = ["sum_pieces"]

# Integer type of an element's bit pattern, by its size in bytes; the same types as in `weight_fingerprint`.
_BITS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


def sum_pieces(
    pieces: np.ndarray,
    num_tensors: int,
    high: torch.Tensor,
    low: torch.Tensor,
    element_size: int,
    block_size: int,
    blocks_per_piece: int,
) -> torch.Tensor:
    """Return int64 [num_tensors]: the fingerprints of tensors with elements of `element_size` bytes.

    `pieces`: int64 [5, pieces], from `weight_fingerprint._pieces`. A piece has up to `blocks_per_piece` blocks of
    `block_size` indices. `high`: weights of the blocks. `low`: weights of the indices within a block.
    """
    sums = torch.zeros(num_tensors, dtype=torch.int64, device=high.device)
    num_pieces = pieces.shape[1]
    if num_pieces:
        table = torch.from_numpy(pieces).to(high.device)
        constants = {"BITS": _BITS[element_size], "BLOCK": block_size, "BLOCKS": blocks_per_piece}
        _sum_piece[(num_pieces,)](table, sums, high, low, num_pieces, **constants, num_warps=8)
    return sums


@triton.jit
def _sum_piece(
    table_ptr, sums_ptr, high_ptr, low_ptr, num_pieces, BITS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """Add the sum of one piece to that of its tensor. The rows of the table are described at `_pieces`."""
    piece = tl.program_id(0)
    address = tl.load(table_ptr + piece)
    start = tl.load(table_ptr + num_pieces + piece)
    end = tl.load(table_ptr + 2 * num_pieces + piece)
    tensor = tl.load(table_ptr + 3 * num_pieces + piece)
    first_block = tl.load(table_ptr + 4 * num_pieces + piece)
    # Points to the first index of the piece's first block. It may lie before the run: the mask below excludes it.
    values = address.to(tl.pointer_type(BITS)) + (first_block * BLOCK - start)
    left = tl.maximum(start - first_block * BLOCK, 0).to(tl.int32)
    right = tl.minimum(end - first_block * BLOCK, BLOCK * BLOCKS).to(tl.int32)
    columns = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.int64)
    for block in tl.static_range(BLOCKS):
        index = columns + block * BLOCK
        bits = tl.load(values + index, (index >= left) & (index < right), 0).to(tl.int64)
        total += bits * tl.load(high_ptr + first_block + block)
    tl.atomic_add(sums_ptr + tensor, tl.sum(total * tl.load(low_ptr + columns), 0))
