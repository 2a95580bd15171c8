"""Add half-precision gradients to a float32 sum on CUDA."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096


def add_gradient(total: torch.Tensor, gradient: torch.Tensor) -> None:
    """total += gradient, for contiguous tensors of different dtypes.

    On an H200, torch's kernel for two dtypes moves 2.3 TB/s, about half of the memory bandwidth.
    """
    elements = total.numel()
    _add[(triton.cdiv(elements, _BLOCK),)](total, gradient, elements, BLOCK=_BLOCK, num_warps=8)


@triton.jit
def _add(total_ptr, gradient_ptr, elements, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    total = tl.load(total_ptr + at, inside, 0.0)
    gradient = tl.load(gradient_ptr + at, inside, 0.0).to(total.dtype)
    tl.store(total_ptr + at, total + gradient, inside)
