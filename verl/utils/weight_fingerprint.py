"""Fingerprint of a tensor: the sum over its elements of bit pattern × weight of the element's index, mod 2^64.

Exact and cheap. The fingerprints of parts, each computed at its place in the full tensor, add up to that of the full
tensor. A changed bit, a transposition, permutation or shift changes it (except with a probability of about 2^-32).

Index i has the weight high[i // BLOCK] × low[i % BLOCK] mod 2^64. Both tables are SplitMix64 (the finaliser of Steele
et al., "Fast splittable pseudorandom number generators", 2014) of their index, made odd: two short tables serve tensors
of any size, and a sum over a block uses one of the factors only once.
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
_LOW, _HIGH = 0, -(1 << 63)  # first index of each table in the sequence of the hash
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements per operation: 256 MB as int64 on a device; on a CPU they stay in its cache.
_CHUNK = {"cpu": 32 * BLOCK}
_LARGE_CHUNK = 8192 * BLOCK
# Blocks of indices per program of the CUDA kernel.
_BLOCKS_PER_PROGRAM = 8

_Key = TypeVar("_Key", bound=Hashable)
_high_tables: dict[torch.device, torch.Tensor] = {}


@dataclass(frozen=True, slots=True)
class Placement:
    """Indices of a part in the full tensor: runs of `run` consecutive elements (None: a single run), the first one at
    index `start`, each `stride` after the previous one."""

    start: int = 0
    run: int | None = None
    stride: int = 0

    @classmethod
    def of_shard(cls, shape: Sequence[int], dim: int, start: int, full: int) -> Placement:
        """Return the placement of a shard of this shape: from `start` on, of `full` entries in dimension `dim`."""
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
    """Return key → fingerprint with a single transfer from the device. `placements`: of tensors that are parts."""
    if not tensors:
        return {}
    device = next(iter(tensors.values())).device
    aligned = [(placements or {}).get(name, FULL) for name in tensors]  # in the order of `tensors`
    if device.type == "cuda" and find_spec("triton") is not None and all(t.device == device for t in tensors.values()):
        return dict(zip(tensors, _sums_on_cuda([_cast(t, dtype) for t in tensors.values()], aligned), strict=True))
    pairs = zip(tensors.values(), aligned, strict=True)
    sums = [tensor_fingerprint(tensor, dtype, placement) for tensor, placement in pairs]
    return dict(zip(tensors, torch.stack([total.to(device) for total in sums]).tolist(), strict=True))


@functools.cache
def low_weights(device: torch.device) -> torch.Tensor:
    """int64 [BLOCK]."""
    return _table(_LOW, BLOCK).to(device)


def high_weights(blocks: int, device: torch.device) -> torch.Tensor:
    """int64 [at least `blocks`]; kept on the device."""
    table = _high_tables.get(device)
    if table is None or len(table) < blocks:
        table = _high_tables[device] = _table(_HIGH, max(1024, 2 * blocks)).to(device)
    return table


def _table(first: int, size: int) -> torch.Tensor:
    return mix_64((torch.arange(1, size + 1) + first) * GOLDEN_64) | 1


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _sum_of_run(bits: torch.Tensor, start: int) -> torch.Tensor:
    """Return the sum over consecutive elements, the first at index `start`; partial blocks at both ends separately."""
    head = min(len(bits), -start % BLOCK)
    body = (len(bits) - head) // BLOCK * BLOCK
    total = _sum_in_block(bits[:head], start) + _sum_in_block(bits[head + body :], start + head + body)
    low, high = low_weights(bits.device), high_weights((start + len(bits)) // BLOCK + 1, bits.device)
    chunk = _CHUNK.get(bits.device.type, _LARGE_CHUNK)
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
    assert placement.run is not None
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    if not placement.run or not len(bits):
        return total
    rows = bits.view(-1, placement.run)
    end = placement.start + (len(rows) - 1) * placement.stride + placement.run
    low, high = low_weights(bits.device), high_weights(end // BLOCK + 1, bits.device)
    columns = torch.arange(placement.run, device=bits.device)
    step = max(1, _CHUNK.get(bits.device.type, _LARGE_CHUNK) // placement.run)
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

    Returns int64 [5, pieces]: address of a run of consecutive elements, its first and last index (exclusive), the
    number of its tensor, the first block of the piece; and the number of blocks of the longest tensor, including those
    that its last piece may reach.
    """
    parts = zip(tensors, placements, strict=True)
    runs = [_runs(number, tensor, placement) for number, (tensor, placement) in enumerate(parts)]
    addresses, starts, ends, owners = np.concatenate(runs, axis=1)
    first = starts // BLOCK
    counts = -(-((ends - 1) // BLOCK + 1 - first) // _BLOCKS_PER_PROGRAM) * (ends > starts)
    run = np.repeat(np.arange(len(first)), counts)
    within = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
    pieces = np.stack([addresses[run], starts[run], ends[run], owners[run], first[run] + _BLOCKS_PER_PROGRAM * within])
    return pieces, int(ends.max(initial=0)) // BLOCK + 1 + _BLOCKS_PER_PROGRAM


def _runs(owner: int, tensor: torch.Tensor, placement: Placement) -> np.ndarray:
    """int64 [4, runs]: address, first and last index (exclusive) of each run, number of the tensor."""
    size = placement.run or tensor.numel()
    number = np.arange(tensor.numel() // size if size else 0, dtype=np.int64)
    starts = placement.start + placement.stride * number
    addresses = tensor.data_ptr() + size * tensor.element_size() * number
    return np.stack([addresses, starts, starts + size, np.full_like(number, owner)])
