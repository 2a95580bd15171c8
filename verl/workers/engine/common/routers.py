"""Experts of a mixture: which ones tokens go through is noted in a pass, told to another, and measured in both.

A router that is told weighs the experts it is told by its own logits, so it still learns. Where sampling and training
choose different experts for a token, their probabilities differ by much more than rounding (R3 of arXiv 2510.11370).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from verl.models.packing import kept_tokens
from verl.models.routing import route_dtype, unrouted
from verl.protocol import DataProto
from verl.utils.device import copy_to_device

COLUMN = "routed_experts"


@dataclass(frozen=True)
class Mixture:
    """The experts of a model."""

    experts: int
    """Of each sparse layer."""
    per_token: int
    sparse: tuple[bool, ...]
    """Of each layer, whether it has experts; the others are dense."""


@dataclass(frozen=True)
class TokenShare:
    """This rank's part of the tokens of a micro-batch: all, or one of equal parts."""

    parts: int = 1
    part: int = 0
    speaks: bool = True
    """Of the ranks that see the same tokens in the same layers, one says what it noted."""
    groups: tuple[dist.ProcessGroup, ...] = ()
    """Who has the other tokens and layers: sums over one group after the other reach everyone."""

    def own(self, tokens: int) -> slice:
        width = tokens // self.parts
        return slice(self.part * width, (self.part + 1) * width)


@dataclass(eq=False)
class Routes:
    """Of one micro-batch, on this rank: what routers are told, and what they chose."""

    kept: torch.Tensor
    """[b, P+R] bool: which tokens of the rows there are, in order."""
    tokens: int
    """Of the micro-batch with its padding, which comes last; those of all ranks that share it."""
    real: int
    """How many of this rank's are no padding."""
    told: torch.Tensor | None
    """[tokens that this rank's routers see, layers, k]; None: they choose."""
    noted: dict[int, torch.Tensor] | None
    """[tokens, k] by layer; None: nobody wants to know."""


class LayerRouter:
    """What the router of one layer is told, and how its experts were used."""

    def __init__(self, layer: int, experts: int) -> None:
        self.layer = layer
        self._experts = experts
        self._counts: torch.Tensor | None = None

    def chosen(self, routes: Routes, own: torch.Tensor) -> torch.Tensor:
        """Experts [tokens, k] for those that the router would choose; of tokens that nobody told of, the same."""
        chosen = own
        if routes.told is not None:
            told = routes.told[:, self.layer].long()
            chosen = torch.where(told < self._experts, told, own)
        if routes.noted is not None:
            routes.noted[self.layer] = chosen.to(route_dtype(self._experts))
        if torch.is_grad_enabled():
            self._count(own[: routes.real], chosen[: routes.real])
        return chosen

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


class Routers:
    """The routers of all layers that are on this rank."""

    def __init__(
        self, here: Sequence[LayerRouter], mixture: Mixture, share: TokenShare, device: torch.device, replays: bool
    ) -> None:
        """`replays`: micro-batches that say which experts are told to the routers."""
        self._here, self._mixture, self._share, self._device = here, mixture, share, device
        self.replays = replays
        self._dtype = route_dtype(mixture.experts)

    def routes(self, part: DataProto, tokens: int, filler: bool, notes: bool) -> Routes:
        """For a micro-batch of `tokens` tokens with its padding, those of all ranks that share it."""
        own, kept = self._share.own(tokens), kept_tokens(part.batch["attention_mask"])
        real = 0 if filler else max(0, min(own.stop, int(kept.sum())) - own.start)
        told = None
        if self.replays and not filler and COLUMN in part.batch.keys():
            given = part.batch[COLUMN][kept]
            rest = given.new_full((tokens - len(given), *given.shape[1:]), unrouted(given.dtype))
            (told,) = copy_to_device([torch.cat([given, rest])[own]], self._device)
        return Routes(kept, tokens, real, told, {} if notes else None)

    def noted(self, data: DataProto, passes: Iterable[tuple[list[int] | None, Routes]]) -> torch.Tensor:
        """[B, P+R, layers, k] on the host: the experts of every token, from passes over all rows. A collective."""
        shape = (*data.batch["attention_mask"].shape, len(self._mixture.sparse), self._mixture.per_token)
        found = torch.full(shape, unrouted(self._dtype), dtype=self._dtype)
        for rows, routes in passes:
            if rows is not None:
                some = found[rows]
                some[routes.kept] = self._gathered(routes)
                found[rows] = some
        found[:, :, [layer for layer, sparse in enumerate(self._mixture.sparse) if not sparse]] = unrouted(self._dtype)
        return found

    def _gathered(self, routes: Routes) -> torch.Tensor:
        """[tokens without padding, layers, k]: what the routers of all ranks that share these rows noted."""
        assert routes.noted is not None
        # Each rank writes what it alone knows: the sum is the whole. Collectives know no int16.
        wide = torch.uint8 if self._dtype == torch.uint8 else torch.int32
        shape = (routes.tokens, len(self._mixture.sparse), self._mixture.per_token)
        table = torch.zeros(shape, dtype=wide, device=self._device)
        if self._share.speaks:
            for layer, chosen in routes.noted.items():
                table[self._share.own(routes.tokens), layer] = chosen.to(wide)
        for group in self._share.groups:
            dist.all_reduce(table, group=group)
        return table[: int(routes.kept.sum())].to("cpu", self._dtype)

    def measured(self) -> dict[str, torch.Tensor]:
        """How experts were used in passes with a gradient since the last time, over all ranks; a collective.

        `moe/busiest`: tokens of a layer's busiest expert by those of its average one, the mean over layers.
        `moe/idle`: experts that no token went through. `moe/replaced`: choices that replay changed.
        """
        table = torch.zeros(len(self._mixture.sparse), self._mixture.experts + 2, device=self._device)
        for router in self._here:
            table[router.layer] = router.taken(table)
        dist.all_reduce(table)
        sparse = table[list(self._mixture.sparse)]
        loads, replaced, chosen = sparse[:, :-2], sparse[:, -2].sum(), sparse[:, -1].sum()
        busiest = (loads.amax(dim=1) / loads.mean(dim=1).clamp(min=1e-9)).mean()
        values = busiest, (loads == 0).float().mean(), replaced / chosen.clamp(min=1)
        return dict(zip(("moe/busiest", "moe/idle", "moe/replaced"), values, strict=True))
