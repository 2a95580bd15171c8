"""Many small tensors to an accelerator by few copies that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["copied_together"]


def copied_together(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Host `tensors` on `device`: joined by dtype in pinned memory, one copy for each dtype."""
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    found: dict[int, torch.Tensor] = {}
    for dtype in {tensor.dtype: None for tensor in tensors}:
        chosen = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        sizes = [tensors[i].numel() for i in chosen]
        pinned = torch.empty(sum(sizes), dtype=dtype, pin_memory=True)
        torch.cat([tensors[i].reshape(-1) for i in chosen], out=pinned)
        parts = pinned.to(device, non_blocking=True).split(sizes)
        found.update({i: part.view(tensors[i].shape) for i, part in zip(chosen, parts, strict=True)})
    return [found[i] for i in range(len(tensors))]
