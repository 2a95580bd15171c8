"""Routers of a Hugging Face model do as they are told, and note what they do; see `engine.common.routers`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from verl.models.routing import expert_weights, routers
from verl.models.ulysses import SequenceParallel
from verl.protocol import DataProto
from verl.workers.engine.common.routers import LayerRouter, Mixture, Routers, Routes, TokenShare

# Of the largest weight; half precision alone makes a part of this.
_LARGEST_GAP = 0.02


class HFRouters(Routers):
    """Those of all layers. A pass, and what of it is computed again for its gradient, goes by what it began with."""

    def __init__(self, hf: nn.Module, sharing: SequenceParallel | None, device: torch.device, replays: bool) -> None:
        found = routers(hf)
        first = next(iter(found.values()))
        layers = range(hf.config.get_text_config().num_hidden_layers)
        mixture = Mixture(first.num_experts, first.top_k, tuple(layer in found for layer in layers))
        share = TokenShare() if sharing is None else TokenShare(sharing.size, sharing.rank, groups=(sharing.group,))
        here = [_HFRouter(layer, router, self, device.type == "cuda") for layer, router in found.items()]
        super().__init__(here, mixture, share, device, replays)
        self.begun: Routes | None = None
        """Of the last pass; None: there were none yet but those that try the model out."""

    @staticmethod
    def of(
        hf: nn.Module, sharing: SequenceParallel | None, device: torch.device, replays: bool, measures: bool
    ) -> HFRouters | None:
        """None where nobody asks what the routers do, or where there are none."""
        if routers(hf):
            return HFRouters(hf, sharing, device, replays) if replays or measures else None
        if replays:
            raise ValueError(f"router_replay.mode: {type(hf).__name__} has no routers whose choice could be replayed.")
        return None

    def begin(self, part: DataProto, tokens: int, filler: bool, notes: bool) -> None:
        """A pass over a micro-batch."""
        self.begun = self.routes(part, tokens, filler, notes)

    @property
    def current(self) -> Routes:
        assert self.begun is not None, "a pass has begun"
        return self.begun


class _HFRouter(LayerRouter):
    """Comes after a router, and puts other experts in the place of those that it chose."""

    def __init__(self, layer: int, router: Any, routers: HFRouters, on_cuda: bool) -> None:
        super().__init__(layer, router.num_experts)
        self._routers = routers
        # What differs from pass to pass would be compiled for each of them. (On a CPU nothing is compiled, and the
        # compiler takes a second to import.)
        router.register_forward_hook(torch.compiler.disable(self._after) if on_cuda else self._after)

    def _after(self, router: Any, given: tuple[torch.Tensor, ...], found: tuple[torch.Tensor, ...]) -> Any:
        """`found` are logits, then weights and experts [tokens, k]; with `None` the router's choice stays."""
        weights, own = found[-2:]
        routes = self._routers.begun
        if routes is None:
            if self._routers.replays:
                _try_out(router, given[0], weights, own)
            return None
        chosen = self.chosen(routes, own)
        if chosen is own:
            return None
        return *found[:-2], expert_weights(router, given[0], chosen).to(weights.dtype), chosen


def _try_out(router: Any, hidden: torch.Tensor, weights: torch.Tensor, own: torch.Tensor) -> None:
    """Refuse a router that weighs experts otherwise than `expert_weights` does."""
    known = isinstance(getattr(router, "weight", None), torch.Tensor)
    gap = (expert_weights(router, hidden, own) - weights).abs().max() / weights.abs().max() if known else 1.0
    if gap > _LARGEST_GAP:
        raise ValueError(
            f"router_replay.mode: {type(router).__name__} weighs experts in a way that is not known here. Set it to"
            " disabled, or add the family to verl.models.routing."
        )
