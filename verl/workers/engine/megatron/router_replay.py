"""Core's routers do as they are told, and note what they do; see `engine.common.routers`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from verl.models.core.architecture import CoreArchitecture
from verl.workers.engine.common.routers import LayerRouter, Mixture, Routers, Routes, TokenShare
from verl.workers.engine.megatron.layout import CoreLayout


class Router(TopKRouter):
    """Core's, in float32 also where Transformer Engine is not installed."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input.float(), self.weight.float())


def core_routers(
    models: Sequence[Any], arch: CoreArchitecture, layout: CoreLayout, device: torch.device, replays: bool
) -> Routers:
    """Those of all layers that are on this rank, in whichever chunk of a pipeline stage."""
    assert arch.experts is not None
    config = models[0].config
    if replays:
        _refuse_what_hides_routers(config)
    here = [
        _CoreRouter(layer, arch.experts.count)
        for model in models
        for layer in model.decoder.layers
        if arch.is_sparse(layer.layer_number - 1)
    ]
    mixture = Mixture(arch.experts.count, arch.experts.per_token, arch.experts.layers)
    return Routers(here, mixture, _share(layout, bool(config.sequence_parallel)), device, replays)


def _share(layout: CoreLayout, sequence_parallel: bool) -> TokenShare:
    """Context ranks share all tokens; tensor ranks, with `sequence_parallel`, the share of one of those."""
    parts, part = layout.cp.size, layout.cp.rank
    if sequence_parallel:
        parts, part = parts * layout.tp.size, part * layout.tp.size + layout.tp.rank
    groups = tuple(part.group for part in (layout.tp, layout.cp, layout.pp) if part.size > 1)
    return TokenShare(parts, part, sequence_parallel or layout.tp.rank == 0, groups)


def _refuse_what_hides_routers(config: Any) -> None:
    """Settings of Core with which its routers do not ask, or ask again at a time of their own."""
    again = config.recompute_granularity == "selective" and "moe" in (config.recompute_modules or ())
    for name, there in (("moe_router_fusion", config.moe_router_fusion), ("recompute_modules=[moe]", again)):
        if there:
            raise ValueError(
                f"megatron_config.override_transformer_config: with {name} experts cannot be replayed. Leave it out,"
                " or set router_replay.mode=disabled."
            )


class _CoreRouter(LayerRouter):
    """What Core asks for the experts of one layer, in place of taking the highest scores."""

    def __init__(self, layer: Any, experts: int) -> None:
        super().__init__(layer.layer_number - 1, experts)
        self._routes: Routes | None = None
        layer.mlp.router.router_replay = self
        # Also where a layer is computed again: it gets what its micro-batch got the first time.
        layer.register_forward_pre_hook(self._enter, with_kwargs=True)

    def _enter(self, layer: Any, args: Any, given: dict[str, Any]) -> None:
        self._routes = given["packed_seq_params"].routes

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        highest: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and experts [tokens, k]; the name is Core's."""
        assert self._routes is not None, "a layer is entered before its router"
        values, own = highest(scores, topk, num_groups=num_groups, group_topk=group_topk)
        chosen = self.chosen(self._routes, own)
        return (values if chosen is own else scores.gather(1, chosen)), chosen
