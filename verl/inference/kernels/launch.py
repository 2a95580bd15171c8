"""Early launches: a kernel's programs are placed while the one before it ends, and wait there for its results."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["begin", "early"]


@cache
def early(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch whose kernel starts with `begin(EARLY)`; GPUs before Hopper launch one after the other."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return {"EARLY": True, "launch_pdl": True} if able else {"EARLY": False}


@triton.jit
def begin(EARLY: tl.constexpr):
    """To be called before anything is read or written: all that earlier kernels wrote is there after it."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
