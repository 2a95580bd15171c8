"""The fused model's operations between matmuls in plain torch, for CPUs and as reference of `kernels.pointwise`."""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.nn.functional import silu

from verl.inference.low_rank import LowRankProduct

__all__ = ["add_rms_norm", "gated_silu", "linear", "rms_norm", "rotated"]


# For a few rows and weights of at least LARGE_WEIGHT elements, CPU libraries compute `weight @ x.t()` up to twice as
# fast as `x @ weight.t()`. Smaller weights are multiplied up to four times as fast if stored column-major.
_FEW_ROWS = range(2, 65)
LARGE_WEIGHT = 2**18


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x` [tokens, in], `weight` [out, in] → [tokens, out]."""
    if len(x) not in _FEW_ROWS or weight.numel() < LARGE_WEIGHT:
        return functional.linear(x, weight, bias)
    out = torch.mm(weight, x.t()).t().contiguous()
    return out if bias is None else out.add_(bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x` [..., size] over its root mean square, times `weight` [size]."""
    if x.dtype == torch.float32:
        return functional.rms_norm(x, x.shape[-1:], weight, eps)
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, adapters: LowRankProduct | None = None
) -> torch.Tensor:
    """Add `x` to `residual` in place; return the `rms_norm` of the sum. The product of `adapters` is added to `x`."""
    if adapters is not None:
        adapters.add_to_(x)
    return rms_norm(residual.add_(x), weight, eps)


def gated_silu(gate_up: torch.Tensor, adapters: LowRankProduct | None = None) -> torch.Tensor:
    """silu(gate) * up of `gate_up` [tokens, 2 * size] → [tokens, size]. The product of `adapters` is added first."""
    if adapters is not None:
        adapters.add_to_(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding: `x` [tokens, heads, dim], `cos`, `sin` [tokens, 1, dim // 2] float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
