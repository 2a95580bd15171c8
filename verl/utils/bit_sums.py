"""Fingerprints of many CUDA tensors in one launch, at the speed of reading them once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from verl.utils.index_mix import BLOCK, Place, high_weights, low_weights

__all__ = ["bit_sums"]

# Blocks of indices that a program takes: the factor of each is used once per element, the other once per program.
_BLOCKS = 8
_BITS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


def bit_sums(tensors: Sequence[torch.Tensor], places: Sequence[Place]) -> torch.Tensor:
    """int64 [tensors]: the sum of each one's elements, read as integers, times the mix of their index in the whole
    tensor (see `weight_fingerprint`, which is the reference). All contiguous, of one dtype and device."""
    device = tensors[0].device
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    pieces, blocks = _pieces(tensors, places)
    if pieces.shape[1]:
        _sum_piece[(pieces.shape[1],)](
            torch.from_numpy(pieces).to(device),
            sums,
            high_weights(blocks, device),
            low_weights(device),
            pieces.shape[1],
            BITS=_BITS[tensors[0].element_size()],
            BLOCK=BLOCK,
            BLOCKS=_BLOCKS,
            num_warps=8,
        )
    return sums


def _pieces(tensors: Sequence[torch.Tensor], places: Sequence[Place]) -> tuple[np.ndarray, int]:
    """int64 [5, pieces]: address of a run of consecutive elements, its first and last index (exclusive), whose it is,
    the first block of the piece; and how many blocks the longest tensor has, those that a last piece may reach too."""
    runs = [_runs(number, tensor, place) for number, (tensor, place) in enumerate(zip(tensors, places, strict=True))]
    addresses, starts, ends, owners = np.concatenate(runs, axis=1)
    first = starts // BLOCK
    counts = -(-((ends - 1) // BLOCK + 1 - first) // _BLOCKS) * (ends > starts)
    run = np.repeat(np.arange(len(first)), counts)
    within = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
    pieces = np.stack([addresses[run], starts[run], ends[run], owners[run], first[run] + _BLOCKS * within])
    return pieces, int(ends.max(initial=0)) // BLOCK + 1 + _BLOCKS


def _runs(owner: int, tensor: torch.Tensor, place: Place) -> np.ndarray:
    """int64 [4, runs]."""
    size = place.run or tensor.numel()
    number = np.arange(tensor.numel() // size if size else 0, dtype=np.int64)
    starts = place.start + place.stride * number
    addresses = tensor.data_ptr() + size * tensor.element_size() * number
    return np.stack([addresses, starts, starts + size, np.full_like(number, owner)])


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
    # Counted from the piece's first index, which may lie before the run: what is outside is not read.
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
