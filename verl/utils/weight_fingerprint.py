"""A fingerprint of a tensor: the int64 sum of its bit patterns. Exact, cheap, and the sum over its shards."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["fingerprints", "tensor_fingerprint"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_fingerprint(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """int64 scalar on the tensor's device; of the tensor cast to `dtype` where both are floating point."""
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    flat = tensor.detach().reshape(-1)
    return flat.view(_BITS[flat.element_size()]).sum(dtype=torch.int64)


def fingerprints(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> dict[str, int]:
    """Name → fingerprint, with one transfer from the device for all of them."""
    if not tensors:
        return {}
    sums = [tensor_fingerprint(tensor, dtype) for tensor in tensors.values()]
    return dict(zip(tensors, torch.stack([total.to(sums[0].device) for total in sums]).tolist(), strict=True))
