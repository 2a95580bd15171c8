"""Experts of a mixture: which ones tokens go through is noted in a pass, told to another, and measured in both.

A router that is told weighs the experts it is told by its own logits, so it still learns. Where sampling and training
choose different experts for a token, their probabilities differ by much more than rounding (R3 of arXiv 2510.11370).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from verl.models.core.architecture import CoreArchitecture
from verl.models.packing import kept_tokens
from verl.models.routing import route_dtype, unrouted
from verl.protocol import DataProto
from verl.utils.device_copy import copied_together
from verl.workers.engine.megatron.layout import CoreLayout

COLUMN = "routed_experts"


class Router(TopKRouter):
    """Core's, in float32 also where Transformer Engine is not installed."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input.float(), self.weight.float())


class Routes:
    """Of one micro-batch, on this rank: what routers are told, and what they chose."""

    def __init__(self, told: torch.Tensor | None, real: int, notes: bool) -> None:
        self.told = told
        """[tokens that this rank's routers see, layers, k]; None: they choose."""
        self.real = real
        """How many of those tokens are no padding; they come first."""
        self.noted: dict[int, torch.Tensor] | None = {} if notes else None
        """[tokens, k] by layer; None: nobody wants to know."""


class Routers:
    """The routers of all layers that are on this rank, in whichever chunk of a pipeline stage."""

    def __init__(
        self, models: Sequence[Any], arch: CoreArchitecture, layout: CoreLayout, device: torch.device, replays: bool
    ) -> None:
        """`replays`: micro-batches that say which experts are told to the routers."""
        assert arch.experts is not None
        config = models[0].config
        if replays:
            _refuse_what_hides_routers(config)
        self._experts, self._layers, self._layout, self._device = arch.experts, arch.layers, layout, device
        self._replays = replays
        self._dtype = route_dtype(arch.experts.count)
        self._shares_tokens = bool(config.sequence_parallel)
        self._here = [
            _Router(layer, arch.experts.count)
            for model in models
            for layer in model.decoder.layers
            if arch.is_sparse(layer.layer_number - 1)
        ]

    def routes(self, part: DataProto, tokens: int, filler: bool, notes: bool) -> Routes:
        """For a micro-batch of `tokens` tokens with its padding, those of all ranks that share it."""
        own = self._own(tokens)
        kept = kept_tokens(part.batch["attention_mask"])
        real = 0 if filler else max(0, min(own.stop, int(kept.sum())) - own.start)
        if not self._replays or COLUMN not in part.batch.keys():
            return Routes(None, real, notes)
        given = part.batch[COLUMN][kept]
        rest = given.new_full((tokens - len(given), *given.shape[1:]), unrouted(given.dtype))
        (told,) = copied_together([torch.cat([given, rest])[own]], self._device)
        return Routes(told, real, notes)

    def _own(self, tokens: int) -> slice:
        """The tokens that this rank's routers see: context ranks share all, tensor ranks the share of one of those."""
        layout = self._layout
        parts, part = layout.cp.size, layout.cp.rank
        if self._shares_tokens:
            parts, part = parts * layout.tp.size, part * layout.tp.size + layout.tp.rank
        width = tokens // parts
        return slice(part * width, (part + 1) * width)

    def gathered(self, routes: Routes, part: DataProto, tokens: int) -> torch.Tensor:
        """[b, P+R, layers, k] on the host: what the routers of all ranks that share these rows noted. A collective."""
        assert routes.noted is not None
        # Each rank writes what it alone knows: the sum is the whole. Collectives know no int16.
        wide = torch.uint8 if self._dtype == torch.uint8 else torch.int32
        table = torch.zeros(tokens, self._layers, self._experts.per_token, dtype=wide, device=self._device)
        if self._shares_tokens or self._layout.tp.rank == 0:
            for layer, chosen in routes.noted.items():
                table[self._own(tokens), layer] = chosen.to(wide)
        for group in (self._layout.tp, self._layout.cp, self._layout.pp):
            if group.size > 1:
                dist.all_reduce(table, group=group.group)
        kept = kept_tokens(part.batch["attention_mask"])
        found = self.unknown(part)
        found[kept] = table[: int(kept.sum())].to("cpu", self._dtype)
        dense = [layer for layer, sparse in enumerate(self._experts.layers) if not sparse]
        found[:, :, dense] = unrouted(self._dtype)
        return found

    def unknown(self, data: DataProto) -> torch.Tensor:
        """[B, P+R, layers, k] of rows of which nothing is noted."""
        shape = (*data.batch["attention_mask"].shape, self._layers, self._experts.per_token)
        return torch.full(shape, unrouted(self._dtype), dtype=self._dtype)

    def measured(self) -> dict[str, float]:
        """How experts were used in passes with a gradient since the last time, over all ranks; a collective.

        `moe/busiest`: tokens of a layer's busiest expert by those of its average one, the mean over layers.
        `moe/idle`: experts that no token went through. `moe/replaced`: choices that replay changed.
        """
        table = torch.zeros(self._layers, self._experts.count + 2, device=self._device)
        for router in self._here:
            table[router.layer] = router.taken(table)
        dist.all_reduce(table)
        sparse = table[list(self._experts.layers)]
        loads, replaced, chosen = sparse[:, :-2], sparse[:, -2].sum(), sparse[:, -1].sum()
        busiest = (loads.amax(dim=1) / loads.mean(dim=1).clamp(min=1e-9)).mean()
        values = torch.stack([busiest, (loads == 0).float().mean(), replaced / chosen.clamp(min=1)]).tolist()
        return dict(zip(("moe/busiest", "moe/idle", "moe/replaced"), values, strict=True))


def _refuse_what_hides_routers(config: Any) -> None:
    """Settings of Core with which its routers do not ask, or ask again at a time of their own."""
    again = config.recompute_granularity == "selective" and "moe" in (config.recompute_modules or ())
    for name, there in (("moe_router_fusion", config.moe_router_fusion), ("recompute_modules=[moe]", again)):
        if there:
            raise ValueError(
                f"megatron_config.override_transformer_config: with {name} experts cannot be replayed. Leave it out,"
                " or set router_replay.mode=disabled."
            )


class _Router:
    """What Core asks for the experts of one layer, in place of taking the highest scores."""

    def __init__(self, layer: Any, experts: int) -> None:
        self.layer = layer.layer_number - 1
        self._routes: Routes | None = None
        self._counts: torch.Tensor | None = None
        self._experts = experts
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
        values, own = highest(scores, topk, num_groups=num_groups, group_topk=group_topk)
        routes, chosen = self._routes, own
        assert routes is not None, "a layer is entered before its router"
        if routes.told is not None:
            told = routes.told[:, self.layer].long()
            chosen = torch.where(told < self._experts, told, own)
            values = scores.gather(1, chosen)
        if routes.noted is not None:
            routes.noted[self.layer] = chosen.to(route_dtype(self._experts))
        if torch.is_grad_enabled():
            self._count(own[: routes.real], chosen[: routes.real])
        return values, chosen

    @torch.no_grad()
    def _count(self, own: torch.Tensor, chosen: torch.Tensor) -> None:
        """Tokens of each expert, choices that are not the router's own, and all of them."""
        kept = (own[:, :, None] == chosen[:, None]).any(dim=1).sum()
        counts = torch.zeros(self._experts + 2, device=own.device)
        counts.index_add_(0, chosen.flatten(), counts.new_ones(chosen.numel()))
        counts[-2:] += chosen.numel()
        counts[-2] -= kept
        self._counts = counts if self._counts is None else self._counts + counts

    def taken(self, like: torch.Tensor) -> torch.Tensor:
        """What was counted since the last time."""
        counts, self._counts = self._counts, None
        return like.new_zeros(self._experts + 2) if counts is None else counts
