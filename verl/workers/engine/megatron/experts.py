"""The experts of a mixture as one product over all of them, where a kernel does that; otherwise one after the other."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch.autograd.function import once_differentiable


class Experts(SequentialMLP):
    """Core's experts, each with weights of its own; on CUDA in bfloat16 all tokens are multiplied at once."""

    def forward(
        self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, shares: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """tokens [T, H], the first expert's first; what each is weighed by [T] -> [T, H]."""
        if not self.multiplies_together(tokens):
            return super().forward(tokens, tokens_per_expert, shares)
        return self.together(tokens, tokens_per_expert, shares), None

    def multiplies_together(self, tokens: torch.Tensor) -> bool:
        """Whether the kernel takes them: it reads rows of whole 16 bytes."""
        widths = self.local_experts[0].linear_fc1.weight.shape[1], self.local_experts[0].linear_fc2.weight.shape[1]
        fits = tokens.is_cuda and tokens.dtype == torch.bfloat16 and not any(width % 8 for width in widths)
        return fits and len(tokens) > 0 and not self.config.add_bias_linear

    def together(self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """The same numbers as those of one expert after the other, for any device that `_grouped_mm` has."""
        ends = tokens_per_expert.to(tokens.device).cumsum(0).to(torch.int32)
        inner = _Products.apply(tokens, ends, *(expert.linear_fc1.weight for expert in self.local_experts))
        gate, up = inner.chunk(2, dim=-1)
        inner = (self.config.activation_func(gate) * up * shares[:, None]).to(tokens.dtype)
        return _Products.apply(inner, ends, *(expert.linear_fc2.weight for expert in self.local_experts))


class _Products(torch.autograd.Function):
    """[T, in] of which `ends` [experts] says where each expert's tokens end, times each one's [out, in] -> [T, out].

    The weights beside each other are made anew for the backward pass: a copy of them per layer would be kept otherwise.
    """

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, ends: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens, ends, *weights)
        return torch._grouped_mm(tokens, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_products: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tokens, ends, *weights = ctx.saved_tensors
        d_products = d_products.contiguous()
        d_tokens = torch._grouped_mm(d_products, torch.stack(weights), offs=ends) if ctx.needs_input_grad[0] else None
        d_weights: tuple[torch.Tensor | None, ...] = (None,) * len(weights)
        if any(ctx.needs_input_grad[2:]):
            d_stacked = torch._grouped_mm(d_products.t(), tokens, offs=ends)
            # Of an expert without tokens not every version writes anything.
            idle = ends == torch.cat([ends.new_zeros(1), ends[:-1]])
            d_weights = d_stacked.masked_fill_(idle[:, None, None], 0.0).unbind()
        return d_tokens, None, *d_weights
