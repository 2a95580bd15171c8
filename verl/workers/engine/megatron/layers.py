"""Layers in place of Megatron-Core's own: packed attention, norms, linear layers, experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, rms_norm

from verl.models.attention import attend
from verl.models.megatron_core import CoreArchitecture
from verl.models.packing import Packing


@dataclass
class CoreConfig(TransformerConfig):
    """Core's configuration of a model, with the architecture it was derived from."""

    arch: CoreArchitecture | None = None


class Norm(nn.Module):
    """RMSNorm with Core's arguments. Core's own wrapper of torch's RMSNorm supports neither sequence parallelism nor
    Gemma's 1 + weight."""

    def __init__(self, config: CoreConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        assert config.arch is not None
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        # With sequence parallelism each tensor rank sees a slice of the tokens: Core sums the gradients over the group.
        self.weight.sequence_parallel = config.sequence_parallel
        self._eps = eps
        self._plus_one = config.arch.norm_adds_one

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self._plus_one:
            return rms_norm(hidden, self.weight.shape, self.weight, self._eps)
        return rms_norm(hidden.float(), self.weight.shape, 1.0 + self.weight.float(), self._eps).to(hidden.dtype)


class _Linear:
    """Mixin for Core's linear layers: torch's own function, with bias, if the layer is not split over ranks."""

    def _forward_impl(self: Any, input: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if self.tp_group.size() == 1:
            return linear(input, weight, kwargs["bias"])
        return super()._forward_impl(input, weight, **{**kwargs, "tp_group": self.tp_group})  # type: ignore[misc]


class ColumnLinear(_Linear, tensor_parallel.ColumnParallelLinear):
    """Output features are split over tensor ranks."""


class RowLinear(_Linear, tensor_parallel.RowParallelLinear):
    """Input features are split over tensor ranks."""


class PackedTokens(PackedSeqParams):
    """Packing and expert routes of a micro-batch, passed to every layer.

    For Core the micro-batch is one plain sequence [T, 1, H]. Core passes this object unread to every layer, also when a
    layer is recomputed, so that no state is kept between passes and several passes may be in flight.
    """

    def __init__(self, packing: Packing, routes: Any = None) -> None:
        """`routes`: the expert routes of a mixture-of-experts model (`routers.Routes`)."""
        super().__init__(qkv_format="sbhd")
        self.packing = packing
        self.routes = routes


class PackedAttention(nn.Module):
    """Causal attention over packed sequences, as Core's `core_attention`; context-parallel ranks exchange tokens for
    heads."""

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: Any) -> None:
        """`layer_number` counts from 1 over all pipeline stages; `config` is a CoreConfig."""
        super().__init__()
        self._window = config.arch.windows[layer_number - 1]
        self._scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedTokens,
        **_: Any,
    ) -> torch.Tensor:
        """query [T, 1, heads, dim], key and value [T, 1, kv heads, dim] -> [T, 1, heads * dim]."""
        query, key, value = (part[:, 0] for part in (query, key, value))
        out = attend(query, key, value, packed_seq_params.packing, self._scale, self._window)
        return out.flatten(1)[:, None]


class GroupedExperts(SequentialMLP):
    """Core's experts, each with its own weights; on CUDA in bfloat16 they use one grouped matrix product."""

    def forward(
        self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, shares: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """tokens [T, H], sorted by expert, and their router weights `shares` [T] -> [T, H]."""
        if not self.supports_grouped(tokens):
            return super().forward(tokens, tokens_per_expert, shares)
        return self.grouped_forward(tokens, tokens_per_expert, shares), None

    def supports_grouped(self, tokens: torch.Tensor) -> bool:
        """Return whether the grouped kernel supports these tokens: it requires rows of multiples of 16 bytes."""
        widths = self.local_experts[0].linear_fc1.weight.shape[1], self.local_experts[0].linear_fc2.weight.shape[1]
        fits = tokens.is_cuda and tokens.dtype == torch.bfloat16 and not any(width % 8 for width in widths)
        return fits and len(tokens) > 0 and not self.config.add_bias_linear

    def grouped_forward(
        self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        """Compute the same result as one expert after the other, on any device that supports `_grouped_mm`."""
        ends = tokens_per_expert.to(tokens.device).cumsum(0).to(torch.int32)
        inner = _GroupedProduct.apply(tokens, ends, *(expert.linear_fc1.weight for expert in self.local_experts))
        gate, up = inner.chunk(2, dim=-1)
        inner = (self.config.activation_func(gate) * up * shares[:, None]).to(tokens.dtype)
        return _GroupedProduct.apply(inner, ends, *(expert.linear_fc2.weight for expert in self.local_experts))


class _GroupedProduct(torch.autograd.Function):
    """Multiply tokens [T, in], whose expert changes at `ends` [experts], by the experts' weights [out, in] -> [T, out].

    The stacked weights are built again for the backward pass, instead of keeping a copy per layer.
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
            # Some versions leave the gradient of an expert without tokens uninitialised.
            idle = ends == torch.cat([ends.new_zeros(1), ends[:-1]])
            d_weights = d_stacked.masked_fill_(idle[:, None, None], 0.0).unbind()
        return d_tokens, None, *d_weights
