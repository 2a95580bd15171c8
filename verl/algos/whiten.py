"""Mean 0 and variance 1 over the model tokens of a batch, in place: the last step of several estimators."""

from __future__ import annotations

import torch


def whiten_(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` [batch, response], 0 where the boolean `mask` is off, are centred and scaled (n - 1) and stay 0 there.

    What `masked_whiten` computes, for values that are known to be clean and may be overwritten: a quarter of its passes
    over memory, and sums in float64.
    """
    count = mask.sum()
    mean = values.sum(dtype=torch.float64) / count.clamp(min=1)
    values.sub_(mean.to(values.dtype)).masked_fill_(~mask, 0.0)
    variance = values.square().sum(dtype=torch.float64) / (count - 1).clamp(min=1)
    return values.mul_(torch.rsqrt(variance + 1e-8).to(values.dtype))
