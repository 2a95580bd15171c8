"""The product of LoRA adapters that is added to the output of a matmul."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["LowRankProduct"]


@dataclass(frozen=True, slots=True)
class LowRankProduct:
    """What adapters add to the output of a matmul: `inner @ up.T`."""

    inner: torch.Tensor
    """x A^T [T, slots * layers * rank]; rows may be strided."""
    up: torch.Tensor
    """[outputs, slots * layers * rank], contiguous; zero where row and column belong to different layers."""
    slots: int
    layers: int
    unused: torch.Tensor | None
    """[T, slots, 1]: whether a token does not use a slot; None: every token uses all slots."""

    def add_to_(self, output: torch.Tensor) -> torch.Tensor:
        """Add the product to `output` [T, outputs] in place. Also sets unused columns of `inner` to zero."""
        if self.unused is not None:
            # Not multiplied by 0: an adapter whose products overflow would make the rows of others NaN.
            self.inner.unflatten(1, (self.slots, -1)).masked_fill_(self.unused, 0.0)
        return output.addmm_(self.inner, self.up.t())
