"""Routing of mixture-of-experts models: record the experts of every token, replay them, and measure expert load.

A router that replays experts weights them by its own logits, so it still receives gradients. If rollout and training
select different experts for a token, their log-probs differ by much more than rounding (R3, arXiv 2510.11370).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from verl.models.packing import Packing, packed_tokens
from verl.models.routing import route_dtype, unrouted
from verl.models.shared_prefixes import TreePacking
from verl.protocol import DataProto
from verl.utils.device import copy_to_device

ROUTED_EXPERTS = "routed_experts"
"""Column [B, P+R, layers, k] with the experts of every token."""


@dataclass(frozen=True)
class MoEShape:
    """The experts of a model."""

    num_experts: int
    """Per sparse layer."""
    top_k: int
    sparse: tuple[bool, ...]
    """For each layer, whether it has experts."""


@dataclass(frozen=True)
class TokenShare:
    """This rank's part of the tokens of a micro-batch: all of them, or one of `parts` equal parts."""

    parts: int = 1
    index: int = 0
    reports: bool = True
    """Whether this rank reports its recorded experts: one of the ranks that see the same tokens in the same layers."""
    groups: tuple[dist.ProcessGroup, ...] = ()
    """Process groups of the ranks with the other tokens and layers; all-reduces over one after the other reach all."""

    def own(self, tokens: int) -> slice:
        """Return the positions of this rank's tokens."""
        width = tokens // self.parts
        return slice(self.index * width, (self.index + 1) * width)


@dataclass(eq=False)
class Routes:
    """Replayed and recorded experts of one micro-batch on this rank."""

    mask: torch.Tensor
    """[b, P+R] bool: the tokens that are not padding."""
    tokens: int
    """Tokens of the packed micro-batch over all ranks that share it, with the padding at its end."""
    valid_tokens: int
    """This rank's tokens without padding."""
    replayed: torch.Tensor | None
    """[this rank's tokens, layers, k]; None: the routers select."""
    recorded: dict[int, torch.Tensor] | None
    """[this rank's tokens, k] by layer; None: not recorded."""
    weights: torch.Tensor | None = None
    """[this rank's tokens without padding]: number of rows that share each token; None: 1."""
    token_index: torch.Tensor | None = None
    """[tokens of all rows]: place of each token in the packed micro-batch, if rows share tokens; on the host."""


class LayerRouter:
    """Replay, recording and load counters of the router of one layer."""

    def __init__(self, layer: int, num_experts: int) -> None:
        self.layer = layer
        self._num_experts = num_experts
        self._counts: torch.Tensor | None = None

    def select(self, routes: Routes, own: torch.Tensor) -> torch.Tensor:
        """Return the experts [tokens, k] to use: replayed experts where known, otherwise `own`, the router's choice."""
        selected = own
        if routes.replayed is not None:
            replayed = routes.replayed[:, self.layer].long()
            selected = torch.where(replayed < self._num_experts, replayed, own)
        if routes.recorded is not None:
            routes.recorded[self.layer] = selected.to(route_dtype(self._num_experts))
        if torch.is_grad_enabled():
            self._count(own[: routes.valid_tokens], selected[: routes.valid_tokens], routes.weights)
        return selected

    @torch.no_grad()
    def _count(self, own: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor | None) -> None:
        """Add to the counters: tokens of each expert, selections that replay changed, all selections. A token counts
        as often as `weights` says."""
        counts = torch.zeros(self._num_experts + 2, device=own.device)
        times = counts.new_ones(len(own), 1) if weights is None else weights[:, None]
        times = times.expand(selected.shape)
        unchanged = ((own[:, :, None] == selected[:, None]).any(dim=1) * times).sum()
        counts.index_add_(0, selected.flatten(), times.flatten())
        counts[-2:] += times.sum()
        counts[-2] -= unchanged
        self._counts = counts if self._counts is None else self._counts + counts

    def pop_counts(self, like: torch.Tensor) -> torch.Tensor:
        """Return and reset the counters [experts + 2]; `like` determines dtype and device of zeros."""
        counts, self._counts = self._counts, None
        return like.new_zeros(self._num_experts + 2) if counts is None else counts


class Routers:
    """The routers of all layers on this rank."""

    def __init__(
        self, layers: Sequence[LayerRouter], shape: MoEShape, share: TokenShare, device: torch.device, replay: bool
    ) -> None:
        """`replay`: use the experts in the column `routed_experts` of batches that have it."""
        self._layers, self._shape, self._share, self._device = layers, shape, share, device
        self.replay = replay
        self._dtype = route_dtype(shape.num_experts)

    def routes(self, part: DataProto, packing: Packing, filler: bool, record: bool) -> Routes:
        """Return the routes of a packed micro-batch, whose `packing` includes padding and all ranks' shares."""
        tokens, tree = packing.total, packing if isinstance(packing, TreePacking) else None
        own, mask = self._share.own(tokens), packed_tokens(part.batch["attention_mask"])
        count = int(mask.sum()) if tree is None else len(tree.owners)
        valid_tokens = 0 if filler else max(0, min(own.stop, count) - own.start)
        replayed, weights = None, None
        if tree is not None:
            weights = torch.from_numpy(tree.tree.weights[own][:valid_tokens]).float()
            (weights,) = copy_to_device([weights], self._device)
        if self.replay and not filler and ROUTED_EXPERTS in part.batch.keys():
            experts = part.batch[ROUTED_EXPERTS][mask]
            if tree is not None:
                experts = experts[torch.from_numpy(tree.owners)]
            padding = experts.new_full((tokens - len(experts), *experts.shape[1:]), unrouted(experts.dtype))
            (replayed,) = copy_to_device([torch.cat([experts, padding])[own]], self._device)
        index = None if tree is None else torch.from_numpy(tree.token_index)
        return Routes(mask, tokens, valid_tokens, replayed, {} if record else None, weights, index)

    def recorded(self, data: DataProto, passes: Iterable[tuple[list[int] | None, Routes]]) -> torch.Tensor:
        """Return [B, P+R, layers, k] on the host: the experts of every token of `data`. A collective.

        `passes` are the row indices (None: a filler) and routes of all micro-batches.
        """
        shape = (*data.batch["attention_mask"].shape, len(self._shape.sparse), self._shape.top_k)
        experts = torch.full(shape, unrouted(self._dtype), dtype=self._dtype)
        for rows, routes in passes:
            if rows is not None:
                row_experts = experts[rows]
                row_experts[routes.mask] = self._gather(routes)
                experts[rows] = row_experts
        dense = [layer for layer, sparse in enumerate(self._shape.sparse) if not sparse]
        experts[:, :, dense] = unrouted(self._dtype)
        return experts

    def _gather(self, routes: Routes) -> torch.Tensor:
        """Return [tokens without padding, layers, k], recorded by all ranks that share the rows."""
        assert routes.recorded is not None
        # Each rank writes the entries that only it has: their sum is complete. Collectives do not support int16.
        wide = torch.uint8 if self._dtype == torch.uint8 else torch.int32
        shape = (routes.tokens, len(self._shape.sparse), self._shape.top_k)
        table = torch.zeros(shape, dtype=wide, device=self._device)
        if self._share.reports:
            for layer, selected in routes.recorded.items():
                table[self._share.own(routes.tokens), layer] = selected.to(wide)
        for group in self._share.groups:
            dist.all_reduce(table, group=group)
        table = table.to("cpu", self._dtype)
        return table[: int(routes.mask.sum())] if routes.token_index is None else table[routes.token_index]

    def load_metrics(self) -> dict[str, torch.Tensor]:
        """Return the expert load of passes with gradient since the last call, over all ranks. A collective.

        `moe/busiest`: tokens of the busiest expert relative to the mean, averaged over layers. `moe/idle`: fraction of
        experts without tokens. `moe/replaced`: fraction of selections that replay changed.
        """
        table = torch.zeros(len(self._shape.sparse), self._shape.num_experts + 2, device=self._device)
        for router in self._layers:
            table[router.layer] = router.pop_counts(table)
        dist.all_reduce(table)
        sparse = table[list(self._shape.sparse)]
        loads, replaced, selected = sparse[:, :-2], sparse[:, -2].sum(), sparse[:, -1].sum()
        busiest = (loads.amax(dim=1) / loads.mean(dim=1).clamp(min=1e-9)).mean()
        values = busiest, (loads == 0).float().mean(), replaced / selected.clamp(min=1)
        return dict(zip(("moe/busiest", "moe/idle", "moe/replaced"), values, strict=True))
