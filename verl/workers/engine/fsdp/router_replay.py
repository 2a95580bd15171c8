"""Routers of a Hugging Face model: forward hooks that replay and record experts (see `engine.common.routers`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from verl.models.routing import expert_weights, routers
from verl.models.ulysses import SequenceParallel
from verl.protocol import DataProto
from verl.workers.engine.common.routers import LayerRouter, MoEShape, Routers, Routes, TokenShare

# Relative to the largest weight; rounding to half precision alone causes a part of it.
_MAX_WEIGHT_ERROR = 0.02


class HFRouters(Routers):
    """The routers of all layers. Recomputed activations use the routes of the pass they belong to."""

    def __init__(self, hf: nn.Module, sharing: SequenceParallel | None, device: torch.device, replay: bool) -> None:
        by_layer = routers(hf)
        first = next(iter(by_layer.values()))
        layers = range(hf.config.get_text_config().num_hidden_layers)
        shape = MoEShape(first.num_experts, first.top_k, tuple(layer in by_layer for layer in layers))
        share = TokenShare() if sharing is None else TokenShare(sharing.size, sharing.rank, groups=(sharing.group,))
        hooks = [_HFRouter(layer, router, self, device.type == "cuda") for layer, router in by_layer.items()]
        super().__init__(hooks, shape, share, device, replay)
        self.active: Routes | None = None
        """Routes of the latest pass; None before the first (only passes that test the model have run)."""

    @staticmethod
    def create(
        hf: nn.Module, sharing: SequenceParallel | None, device: torch.device, replay: bool, measure: bool
    ) -> HFRouters | None:
        """Return None if the model has no routers, or if they are neither replayed nor measured."""
        if routers(hf):
            return HFRouters(hf, sharing, device, replay) if replay or measure else None
        if replay:
            raise ValueError(f"router_replay.mode: {type(hf).__name__} has no routers to replay. Set it to disabled.")
        return None

    def begin(self, part: DataProto, tokens: int, filler: bool, record: bool) -> None:
        """Activate the routes of a micro-batch, before its pass."""
        self.active = self.routes(part, tokens, filler, record)


class _HFRouter(LayerRouter):
    """Forward hook of a router that replaces the selected experts."""

    def __init__(self, layer: int, router: Any, routers: HFRouters, on_cuda: bool) -> None:
        super().__init__(layer, router.num_experts)
        self._routers = routers
        # The hook differs from pass to pass and would be recompiled for each. (Nothing is compiled on a CPU, where
        # importing the compiler takes a second.)
        router.register_forward_hook(torch.compiler.disable(self._hook) if on_cuda else self._hook)

    def _hook(self, router: Any, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> Any:
        """`outputs` are logits, weights and experts [tokens, k]; returning None keeps them."""
        weights, own = outputs[-2:]
        routes = self._routers.active
        if routes is None:
            if self._routers.replay:
                _check_expert_weights(router, inputs[0], weights, own)
            return None
        selected = self.select(routes, own)
        if selected is own:
            return None
        return *outputs[:-2], expert_weights(router, inputs[0], selected).to(weights.dtype), selected


def _check_expert_weights(router: Any, hidden: torch.Tensor, weights: torch.Tensor, own: torch.Tensor) -> None:
    """Raise ValueError if the router weights experts differently from `expert_weights`."""
    supported = isinstance(getattr(router, "weight", None), torch.Tensor)
    error = (expert_weights(router, hidden, own) - weights).abs().max() / weights.abs().max() if supported else 1.0
    if error > _MAX_WEIGHT_ERROR:
        raise ValueError(
            f"router_replay.mode: {type(router).__name__} weights experts in an unsupported way. Set it to disabled, or"
            " add the model family to verl.models.routing."
        )
