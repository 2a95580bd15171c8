"""A fingerprint of a tensor: the sum over its elements of bit pattern × a mix of the element's index, mod 2^64.

Exact and cheap. Parts of a tensor, each taken at its place in the whole, add up to the fingerprint of the whole; a
changed bit, a transposed, permuted or shifted tensor has another one (but for a chance of about 2^-32 or less).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from importlib.util import find_spec
from typing import TypeVar

import torch

from verl.utils.index_mix import BLOCK, Place, high_weights, low_weights

__all__ = ["Place", "fingerprints", "tensor_fingerprint"]

_SHIFT = BLOCK.bit_length() - 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements at a time: as int64 they are 256 MB of a device; on a CPU they stay in its cache.
_CHUNK = {"cpu": 32 * BLOCK}
_LARGE_CHUNK = 8192 * BLOCK


_Key = TypeVar("_Key", bound=Hashable)

WHOLE = Place()


def tensor_fingerprint(tensor: torch.Tensor, dtype: torch.dtype | None = None, place: Place = WHOLE) -> torch.Tensor:
    """int64 scalar on the tensor's device; of the tensor cast to `dtype` where both are floating point."""
    flat = _cast(tensor, dtype).detach().reshape(-1)
    bits = flat.view(_BITS[flat.element_size()])
    return _sum_of_run(bits, place.start) if place.run is None else _sum_of_runs(bits, place)


def fingerprints(
    tensors: Mapping[_Key, torch.Tensor],
    dtype: torch.dtype | None = None,
    places: Mapping[_Key, Place] | None = None,
) -> dict[_Key, int]:
    """Key → fingerprint, with one transfer from the device for all of them. `places`: of those that are parts."""
    if not tensors:
        return {}
    device = next(iter(tensors.values())).device
    where = [(places or {}).get(name, WHOLE) for name in tensors]
    if device.type == "cuda" and find_spec("triton") is not None and all(t.device == device for t in tensors.values()):
        return dict(zip(tensors, _sums_on_cuda([_cast(t, dtype) for t in tensors.values()], where), strict=True))
    sums = [tensor_fingerprint(tensor, dtype, place) for tensor, place in zip(tensors.values(), where, strict=True)]
    return dict(zip(tensors, torch.stack([total.to(device) for total in sums]).tolist(), strict=True))


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _sum_of_run(bits: torch.Tensor, start: int) -> torch.Tensor:
    """Of consecutive elements, the first at index `start`: whole blocks at once, what is left at both ends apart."""
    head = min(len(bits), -start % BLOCK)
    body = (len(bits) - head) // BLOCK * BLOCK
    total = _sum_at(bits[:head], start) + _sum_at(bits[head + body :], start + head + body)
    low, high = low_weights(bits.device), high_weights((start + len(bits)) // BLOCK + 1, bits.device)
    chunk = _CHUNK.get(bits.device.type, _LARGE_CHUNK)
    for first in range(head, head + body, chunk):
        blocks = bits[first : min(first + chunk, head + body)].view(-1, BLOCK)
        number = (start + first) // BLOCK
        total += ((blocks * low).sum(1) * high[number : number + len(blocks)]).sum()
    return total


def _sum_at(bits: torch.Tensor, start: int) -> torch.Tensor:
    """Of less than a block of consecutive elements, which lie in one block."""
    low, high = low_weights(bits.device), high_weights(start // BLOCK + 1, bits.device)
    first = start % BLOCK
    return (bits * low[first : first + len(bits)]).sum() * high[start // BLOCK]


def _sum_of_runs(bits: torch.Tensor, place: Place) -> torch.Tensor:
    assert place.run is not None
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    if not place.run or not len(bits):
        return total
    rows = bits.view(-1, place.run)
    end = place.start + (len(rows) - 1) * place.stride + place.run
    low, high = low_weights(bits.device), high_weights(end // BLOCK + 1, bits.device)
    columns = torch.arange(place.run, device=bits.device)
    step = max(1, _CHUNK.get(bits.device.type, _LARGE_CHUNK) // place.run)
    for first in range(0, len(rows), step):
        part = rows[first : first + step]
        starts = place.start + place.stride * torch.arange(first, first + len(part), device=bits.device)
        index = starts.unsqueeze(1) + columns
        total += (part * (low[index & (BLOCK - 1)] * high[index >> _SHIFT])).sum()
    return total


def _sums_on_cuda(tensors: list[torch.Tensor], places: list[Place]) -> list[int]:
    """Their fingerprints, by one launch for each width of an element that occurs."""
    from verl.utils.bit_sums import bit_sums

    sums = torch.empty(len(tensors), dtype=torch.int64, device=tensors[0].device)
    widths = [tensor.element_size() for tensor in tensors]
    for width in set(widths):
        index = [i for i, found in enumerate(widths) if found == width]
        sums[index] = bit_sums([tensors[i].contiguous() for i in index], [places[i] for i in index])
    return sums.tolist()
