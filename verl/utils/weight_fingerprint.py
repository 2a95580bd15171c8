"""Fingerprint of a tensor: the sum over its elements of bit pattern × weight of the element's index, mod 2^64.

Integer arithmetic, so it is the same on all devices and in any order of summation. The fingerprints of the shards of a
tensor, each computed with the indices that its elements have in the full tensor, add up to the fingerprint of the full
tensor. A changed bit, a transposition, permutation or shift changes it (except with a probability of about 2^-32).

Index i has the weight high[i // BLOCK] × low[i % BLOCK] mod 2^64. Entry k of each table is SplitMix64 of k (the
finaliser of Steele et al., "Fast splittable pseudorandom number generators", 2014), made odd. Because of the product,
two short tables are enough for tensors of any size, and the sum over a block is multiplied by `high` only once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TypeVar

import numpy as np
import torch

from verl.utils.counter_noise import GOLDEN_64, mix_64

__all__ = ["BLOCK", "Placement", "fingerprints", "high_weights", "low_weights", "tensor_fingerprint"]

BLOCK = 4096
_SHIFT = BLOCK.bit_length() - 1
_LOW, _HIGH = 0, -(1 << 63)  # offset of each table in the SplitMix64 sequence: the two do not overlap
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements per operation. On a CPU they fit into its cache; on a device they take 256 MB as int64.
_CHUNK_ELEMENTS_CPU = 32 * BLOCK
_CHUNK_ELEMENTS_DEVICE = 8192 * BLOCK
# Blocks of indices per program of the CUDA kernel.
_BLOCKS_PER_PROGRAM = 8

_Key = TypeVar("_Key", bound=Hashable)
_high_tables: dict[torch.device, torch.Tensor] = {}


@dataclass(frozen=True, slots=True)
class Placement:
    """Indices of the elements of a shard in the flattened full tensor: runs of consecutive indices."""

    start: int = 0
    """First index of the first run."""
    run: int | None = None
    """Number of elements of a run; None: the shard is a single run."""
    stride: int = 0
    """Distance between the first indices of two successive runs."""

    @classmethod
    def of_shard(cls, shape: Sequence[int], dim: int, start: int, full: int) -> Placement:
        """Return the placement of a shard of a tensor that is split along `dim`.

        `shape`: of the shard. `start`: its first entry in dimension `dim`. `full`: size of that dimension in the full
        tensor.
        """
        inner = math.prod(shape[dim + 1 :])
        if math.prod(shape[:dim]) == 1:
            return cls(start * inner)
        return cls(start * inner, shape[dim] * inner, full * inner)


FULL = Placement()


def tensor_fingerprint(
    tensor: torch.Tensor, dtype: torch.dtype | None = None, placement: Placement = FULL
) -> torch.Tensor:
    """Return an int64 scalar on the tensor's device; floating-point tensors are cast to `dtype` first."""
    flat = _cast(tensor, dtype).detach().reshape(-1)
    bits = flat.view(_BITS[flat.element_size()])
    return _sum_of_run(bits, placement.start) if placement.run is None else _sum_of_runs(bits, placement)


def fingerprints(
    tensors: Mapping[_Key, torch.Tensor],
    dtype: torch.dtype | None = None,
    placements: Mapping[_Key, Placement] | None = None,
) -> dict[_Key, int]:
    """Return the fingerprint of every tensor, with a single transfer from the device. `placements`: of shards; tensors
    without one are full tensors."""
    if not tensors:
        return {}
    device = next(iter(tensors.values())).device
    all_placements = [(placements or {}).get(name, FULL) for name in tensors]
    if device.type == "cuda" and find_spec("triton") is not None and all(t.device == device for t in tensors.values()):
        sums_on_cuda = _sums_on_cuda([_cast(tensor, dtype) for tensor in tensors.values()], all_placements)
        return dict(zip(tensors, sums_on_cuda, strict=True))
    pairs = zip(tensors.values(), all_placements, strict=True)
    sums = [tensor_fingerprint(tensor, dtype, placement) for tensor, placement in pairs]
    return dict(zip(tensors, torch.stack([total.to(device) for total in sums]).tolist(), strict=True))


@functools.cache
def low_weights(device: torch.device) -> torch.Tensor:
    """Return the weights of the positions within a block: int64 [BLOCK]."""
    return _table(_LOW, BLOCK).to(device)


def high_weights(blocks: int, device: torch.device) -> torch.Tensor:
    """Return the weights of the blocks: int64 [at least `blocks`]. The table is cached on the device."""
    table = _high_tables.get(device)
    if table is None or len(table) < blocks:
        table = _high_tables[device] = _table(_HIGH, max(1024, 2 * blocks)).to(device)
    return table


def _table(first: int, size: int) -> torch.Tensor:
    return mix_64((torch.arange(1, size + 1) + first) * GOLDEN_64) | 1


def _chunk_elements(device: torch.device) -> int:
    return _CHUNK_ELEMENTS_CPU if device.type == "cpu" else _CHUNK_ELEMENTS_DEVICE


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _sum_of_run(bits: torch.Tensor, start: int) -> torch.Tensor:
    """Return the sum over consecutive elements, the first at index `start`.

    Incomplete blocks at both ends are summed separately.
    """
    head = min(len(bits), -start % BLOCK)
    body = (len(bits) - head) // BLOCK * BLOCK
    total = _sum_in_block(bits[:head], start) + _sum_in_block(bits[head + body :], start + head + body)
    low, high = low_weights(bits.device), high_weights((start + len(bits)) // BLOCK + 1, bits.device)
    chunk = _chunk_elements(bits.device)
    for first in range(head, head + body, chunk):
        blocks = bits[first : min(first + chunk, head + body)].view(-1, BLOCK)
        number = (start + first) // BLOCK
        total += ((blocks * low).sum(1) * high[number : number + len(blocks)]).sum()
    return total


def _sum_in_block(bits: torch.Tensor, start: int) -> torch.Tensor:
    """Return the sum over consecutive elements of one block, the first at index `start`."""
    low, high = low_weights(bits.device), high_weights(start // BLOCK + 1, bits.device)
    first = start % BLOCK
    return (bits * low[first : first + len(bits)]).sum() * high[start // BLOCK]


def _sum_of_runs(bits: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Return the sum over the elements of a shard of several runs."""
    assert placement.run is not None
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    if not placement.run or not len(bits):
        return total
    rows = bits.view(-1, placement.run)
    end = placement.start + (len(rows) - 1) * placement.stride + placement.run
    low, high = low_weights(bits.device), high_weights(end // BLOCK + 1, bits.device)
    columns = torch.arange(placement.run, device=bits.device)
    step = max(1, _chunk_elements(bits.device) // placement.run)
    for first in range(0, len(rows), step):
        part = rows[first : first + step]
        starts = placement.start + placement.stride * torch.arange(first, first + len(part), device=bits.device)
        index = starts.unsqueeze(1) + columns
        total += (part * (low[index & (BLOCK - 1)] * high[index >> _SHIFT])).sum()
    return total


def _sums_on_cuda(tensors: list[torch.Tensor], placements: list[Placement]) -> list[int]:
    """Fingerprints by one kernel launch per element size, at the speed of reading the tensors once."""
    from verl.utils.weight_fingerprint_kernel import sum_pieces

    device = tensors[0].device
    sums = torch.empty(len(tensors), dtype=torch.int64, device=device)
    widths = [tensor.element_size() for tensor in tensors]
    for width in set(widths):
        index = [i for i, other in enumerate(widths) if other == width]
        chosen = [tensors[i].contiguous() for i in index]  # kept alive until the kernel is launched
        pieces, blocks = _pieces(chosen, [placements[i] for i in index])
        weights = high_weights(blocks, device), low_weights(device)
        sums[index] = sum_pieces(pieces, len(index), *weights, width, BLOCK, _BLOCKS_PER_PROGRAM)
    return sums.tolist()


def _pieces(tensors: Sequence[torch.Tensor], placements: Sequence[Placement]) -> tuple[np.ndarray, int]:
    """Divide contiguous tensors into pieces, one per program of the kernel.

    Returns int64 [5, pieces] with one column per piece: address of its run of consecutive elements, start and end index
    (exclusive) of the run, number of the tensor, first block of the piece. Also returns the size of the table of block
    weights that the kernel needs: the last piece of a run reads up to `_BLOCKS_PER_PROGRAM` blocks beyond its end.
    """
    shards = zip(tensors, placements, strict=True)
    runs = [_runs(number, tensor, placement) for number, (tensor, placement) in enumerate(shards)]
    addresses, starts, ends, tensor_numbers = np.concatenate(runs, axis=1)
    first_block = starts // BLOCK
    blocks_per_run = (ends - 1) // BLOCK + 1 - first_block
    pieces_per_run = _ceil_div(blocks_per_run, _BLOCKS_PER_PROGRAM)
    run_of_piece = np.repeat(np.arange(len(first_block)), pieces_per_run)
    first_piece_of_run = np.cumsum(pieces_per_run) - pieces_per_run
    number_in_run = np.arange(len(run_of_piece)) - first_piece_of_run[run_of_piece]
    first_block_of_piece = first_block[run_of_piece] + _BLOCKS_PER_PROGRAM * number_in_run
    run_values = [values[run_of_piece] for values in (addresses, starts, ends, tensor_numbers)]
    return np.stack([*run_values, first_block_of_piece]), int(ends.max(initial=0)) // BLOCK + 1 + _BLOCKS_PER_PROGRAM


def _ceil_div(dividend: np.ndarray, divisor: int) -> np.ndarray:
    return -(-dividend // divisor)


def _runs(tensor_number: int, tensor: torch.Tensor, placement: Placement) -> np.ndarray:
    """Return int64 [4, runs]: address, start and end index (exclusive) of each run, number of the tensor."""
    size = placement.run or tensor.numel()
    run_numbers = np.arange(tensor.numel() // size if size else 0, dtype=np.int64)
    starts = placement.start + placement.stride * run_numbers
    addresses = tensor.data_ptr() + size * tensor.element_size() * run_numbers
    return np.stack([addresses, starts, starts + size, np.full_like(run_numbers, tensor_number)])
