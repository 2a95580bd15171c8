"""Replacements of Megatron-Core layers: attention, RMSNorm, linear layers, grouped experts, and routers with replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, rms_norm

from verl.models.attention import attend
from verl.models.megatron_core import CoreArchitecture
from verl.models.packing import Packing
from verl.workers.engine.common.routers import LayerRouter, MoEShape, Routers, Routes, TokenShare
from verl.workers.engine.megatron.layout import CoreLayout


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
        # With sequence parallelism each tensor-parallel rank sees a slice of the tokens: Core sums the
        # gradients over the group.
        self.weight.sequence_parallel = config.sequence_parallel
        self._eps = eps
        self._plus_one = config.arch.norm_adds_one

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self._plus_one:
            return rms_norm(hidden, self.weight.shape, self.weight, self._eps)
        return rms_norm(hidden.float(), self.weight.shape, 1.0 + self.weight.float(), self._eps).to(hidden.dtype)


class _Linear:
    """Mixin for Core's parallel linear layers: without tensor parallelism, `torch.nn.functional.linear` (with the bias)
    replaces Core's own autograd function."""

    def _forward_impl(self: Any, input: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if self.tp_group.size() == 1:
            return linear(input, weight, kwargs["bias"])
        return super()._forward_impl(input, weight, **{**kwargs, "tp_group": self.tp_group})  # type: ignore[misc]


class ColumnLinear(_Linear, tensor_parallel.ColumnParallelLinear):
    """Output features are split over tensor-parallel ranks."""


class RowLinear(_Linear, tensor_parallel.RowParallelLinear):
    """Input features are split over tensor-parallel ranks."""


class PackedTokens(PackedSeqParams):
    """Packing and expert routes of a micro-batch, passed to every layer.

    Core treats the micro-batch as one unpacked sequence [T, 1, H]. It passes this object to every layer without reading
    it, also when activations are recomputed in the backward pass. Layers thus keep no state between passes, and several
    micro-batches may be in flight (pipeline parallelism).
    """

    def __init__(self, packing: Packing, routes: Routes | None = None) -> None:
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
        self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, router_weights: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """tokens [T, H], sorted by expert, and their router_weights [T] -> [T, H]."""
        if not self.supports_grouped(tokens):
            return super().forward(tokens, tokens_per_expert, router_weights)
        return self.grouped_forward(tokens, tokens_per_expert, router_weights), None

    def supports_grouped(self, tokens: torch.Tensor) -> bool:
        """Return whether the grouped kernel supports these tokens: it requires rows of multiples of 16 bytes."""
        widths = self.local_experts[0].linear_fc1.weight.shape[1], self.local_experts[0].linear_fc2.weight.shape[1]
        fits = tokens.is_cuda and tokens.dtype == torch.bfloat16 and not any(width % 8 for width in widths)
        return fits and len(tokens) > 0 and not self.config.add_bias_linear

    def grouped_forward(
        self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, router_weights: torch.Tensor
    ) -> torch.Tensor:
        """Apply all experts with grouped matrix products, on any device that supports `torch._grouped_mm`.

        Shapes and result are those of `forward`.
        """
        ends = tokens_per_expert.to(tokens.device).cumsum(0).to(torch.int32)
        hidden = _GroupedMatmul.apply(tokens, ends, *(expert.linear_fc1.weight for expert in self.local_experts))
        gate, up = hidden.chunk(2, dim=-1)
        hidden = (self.config.activation_func(gate) * up * router_weights[:, None]).to(tokens.dtype)
        return _GroupedMatmul.apply(hidden, ends, *(expert.linear_fc2.weight for expert in self.local_experts))


class _GroupedMatmul(torch.autograd.Function):
    """Multiply each token by the weights of its expert: tokens [T, in], sorted by expert -> [T, out].

    `ends` [experts]: index after the last token of each expert. `weights`: [out, in] per expert; they are stacked again
    in the backward pass, because keeping the stacked copy would double the memory of the weights.
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


# ---------------------------------------------------------------- routers that replay and record experts


class Float32Router(TopKRouter):
    """Core's router, in float32 also without Transformer Engine."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input.float(), self.weight.float())


def core_routers(
    models: Sequence[Any], arch: CoreArchitecture, layout: CoreLayout, device: torch.device, replay: bool
) -> Routers:
    """Return the routers of all layers on this rank, in all model chunks of its pipeline stage."""
    assert arch.experts is not None
    config = models[0].config
    if replay:
        _check_replay_supported(config)
    layers = [
        _CoreRouter(layer, arch.experts.count)
        for model in models
        for layer in model.decoder.layers
        if arch.is_sparse(layer.layer_number - 1)
    ]
    shape = MoEShape(arch.experts.count, arch.experts.per_token, arch.experts.layers)
    return Routers(layers, shape, _token_share(layout, bool(config.sequence_parallel)), device, replay)


def _token_share(layout: CoreLayout, sequence_parallel: bool) -> TokenShare:
    """Return this rank's tokens: context-parallel ranks split all tokens; with `sequence_parallel`, tensor-parallel
    ranks split the tokens of a context-parallel rank."""
    parts, index = layout.cp.size, layout.cp.rank
    if sequence_parallel:
        parts, index = parts * layout.tp.size, index * layout.tp.size + layout.tp.rank
    groups = tuple(part.group for part in (layout.tp, layout.cp, layout.pp) if part.size > 1)
    return TokenShare(parts, index, sequence_parallel or layout.tp.rank == 0, groups)


def _check_replay_supported(config: Any) -> None:
    """Raise ValueError for settings with which Core's routers bypass the replay hook, or recompute it out of order."""
    recomputes_moe = config.recompute_granularity == "selective" and "moe" in (config.recompute_modules or ())
    for name, active in (("moe_router_fusion", config.moe_router_fusion), ("recompute_modules=[moe]", recomputes_moe)):
        if active:
            raise ValueError(
                f"megatron_config.override_transformer_config: {name} does not support expert replay. Remove it, or set"
                " router_replay.mode=disabled."
            )


class _CoreRouter(LayerRouter):
    """Replay hook of one layer: Core calls `get_replay_topk` instead of selecting the highest scores."""

    def __init__(self, layer: Any, num_experts: int) -> None:
        super().__init__(layer.layer_number - 1, num_experts)
        self._routes: Routes | None = None
        layer.mlp.router.router_replay = self
        # Also called when the layer is recomputed: it then receives the routes of the same micro-batch again.
        layer.register_forward_pre_hook(self._set_routes, with_kwargs=True)

    def _set_routes(self, layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self._routes = kwargs["packed_seq_params"].routes

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        highest: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and experts [tokens, k]. Called by Core, which defines the name."""
        assert self._routes is not None, "the pre-hook of the layer runs before its router"
        values, own = highest(scores, topk, num_groups=num_groups, group_topk=group_topk)
        selected = self.select(self._routes, own)
        return (values if selected is own else scores.gather(1, selected)), selected
