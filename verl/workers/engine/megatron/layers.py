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
from verl.models.core.architecture import CoreArchitecture
from verl.models.packing import Packing


@dataclass
class CoreConfig(TransformerConfig):
    """Core's configuration of a model, with the architecture that it came from."""

    arch: CoreArchitecture | None = None


class Norm(nn.Module):
    """RMSNorm with Core's arguments. Core's own of torch knows no sequence parallelism, and not Gemma's 1 + weight."""

    def __init__(self, config: CoreConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        assert config.arch is not None
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        # Each rank of a tensor group sees its slice of the tokens: Core adds the gradients up over the group.
        self.weight.sequence_parallel = config.sequence_parallel
        self._eps = eps
        self._plus_one = config.arch.norm_adds_one

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self._plus_one:
            return rms_norm(hidden, self.weight.shape, self.weight, self._eps)
        return rms_norm(hidden.float(), self.weight.shape, 1.0 + self.weight.float(), self._eps).to(hidden.dtype)


class _Linear:
    """Before one of Core's linear layers: where no other rank has a part of it, it is torch's own, bias and all."""

    def _forward_impl(self: Any, input: torch.Tensor, weight: torch.Tensor, **given: Any) -> torch.Tensor:
        if self.tp_group.size() == 1:
            return linear(input, weight, given["bias"])
        return super()._forward_impl(input, weight, **{**given, "tp_group": self.tp_group})  # type: ignore[misc]


class ColumnLinear(_Linear, tensor_parallel.ColumnParallelLinear):
    """Output features are shared by tensor ranks."""


class RowLinear(_Linear, tensor_parallel.RowParallelLinear):
    """Input features are shared by tensor ranks."""


class PackedTokens(PackedSeqParams):
    """What a micro-batch tells every layer; to Core's own code it is no packed sequence."""

    def __init__(self, packing: Packing, routes: Any = None) -> None:
        """`routes` are what routers of a mixture are told (`routers.Routes`)."""
        super().__init__(qkv_format="sbhd")
        self.packing = packing
        self.routes = routes


class PackedAttention(nn.Module):
    """Core's `core_attention` without parameters, as torch's and flash-attn's kernels or plain torch compute it."""

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
