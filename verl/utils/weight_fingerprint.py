"""A fingerprint of a tensor: the int64 sum of its bit patterns. Exact, cheap, and the sum over its shards."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

import torch

__all__ = ["fingerprints", "tensor_fingerprint"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_fingerprint(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """int64 scalar on the tensor's device; of the tensor cast to `dtype` where both are floating point."""
    flat = _cast(tensor, dtype).detach().reshape(-1)
    return flat.view(_BITS[flat.element_size()]).sum(dtype=torch.int64)


def fingerprints(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> dict[str, int]:
    """Name → fingerprint, with one transfer from the device for all of them."""
    if not tensors:
        return {}
    device = next(iter(tensors.values())).device
    if device.type == "cuda" and find_spec("triton") is not None and all(t.device == device for t in tensors.values()):
        return dict(zip(tensors, _sums_on_cuda([_cast(t, dtype) for t in tensors.values()]), strict=True))
    sums = [tensor_fingerprint(tensor, dtype) for tensor in tensors.values()]
    return dict(zip(tensors, torch.stack([total.to(device) for total in sums]).tolist(), strict=True))


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _sums_on_cuda(tensors: list[torch.Tensor]) -> list[int]:
    """Their fingerprints, by one launch for each width of an element that occurs."""
    from verl.utils.bit_sums import bit_sums

    sums = torch.empty(len(tensors), dtype=torch.int64, device=tensors[0].device)
    widths = [tensor.element_size() for tensor in tensors]
    for width in set(widths):
        index = [i for i, found in enumerate(widths) if found == width]
        sums[index] = bit_sums([tensors[i].contiguous() for i in index])
    return sums.tolist()
