"""Routers of Megatron-Core that replay and record experts (see `engine.common.routers`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from verl.models.megatron_core import CoreArchitecture
from verl.workers.engine.common.routers import LayerRouter, MoEShape, Routers, Routes, TokenShare
from verl.workers.engine.megatron.layout import CoreLayout


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
    """Context ranks split all tokens; with `sequence_parallel`, tensor ranks split the tokens of a context rank."""
    parts, index = layout.cp.size, layout.cp.rank
    if sequence_parallel:
        parts, index = parts * layout.tp.size, index * layout.tp.size + layout.tp.rank
    groups = tuple(part.group for part in (layout.tp, layout.cp, layout.pp) if part.size > 1)
    return TokenShare(parts, index, sequence_parallel or layout.tp.rank == 0, groups)


def _check_replay_supported(config: Any) -> None:
    """Refuse settings with which Core's routers bypass the replay hook, or recompute it out of order."""
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
