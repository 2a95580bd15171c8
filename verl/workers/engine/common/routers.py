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
    """Whether this rank reports its recorded experts: true on one of the ranks with the same tokens and layers."""
    groups: tuple[dist.ProcessGroup, ...] = ()
    """Process groups over which tokens and layers are split; an all-reduce over each of them in turn sums all parts."""

    def own(self, tokens: int) -> slice:
        """Return the positions of this rank's tokens."""
        width = tokens // self.parts
        return slice(self.index * width, (self.index + 1) * width)


@dataclass(eq=False)
class Routes:
    """Replayed and recorded experts of one micro-batch on this rank."""

    mask: torch.Tensor
    """[b, P+R] bool: the tokens that are not padding."""
    token_index: torch.Tensor
    """[tokens of the mask] index of each token in the packed micro-batch, where rows may share tokens."""
    tokens: int
    """Tokens of the packed micro-batch over all ranks that share it, with the padding at its end."""
    valid_tokens: int
    """This rank's tokens without padding."""
    weights: torch.Tensor
    """[valid tokens] number of rows that share each token."""
    replayed: torch.Tensor | None
    """[this rank's tokens, layers, k]; None: the routers select."""
    recorded: dict[int, torch.Tensor] | None
    """[this rank's tokens, k] by layer; None: not recorded."""


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
    def _count(self, own: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor) -> None:
        """Add to the counters: tokens of each expert, selections that replay changed, all selections. A token counts
        `weights` [tokens] times."""
        counts = torch.zeros(self._num_experts + 2, device=own.device)
        times = weights[:, None].expand(selected.shape)
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
        tokens, mask = packing.total, packed_tokens(part.batch["attention_mask"])
        if isinstance(packing, TreePacking):
            index = torch.from_numpy(packing.token_index)
        else:
            index = torch.arange(int(mask.sum()))
        own = self._share.own(tokens)
        valid_tokens = 0 if filler else max(0, min(own.stop, int(index.max()) + 1) - own.start)
        weights = torch.bincount(index, minlength=tokens)[own][:valid_tokens].float()
        replayed = None
        if self.replay and not filler and ROUTED_EXPERTS in part.batch.keys():
            experts = part.batch[ROUTED_EXPERTS]
            table = experts.new_full((tokens, *experts.shape[2:]), unrouted(experts.dtype))
            table[index] = experts[mask]
            (replayed,) = copy_to_device([table[own]], self._device)
        (weights,) = copy_to_device([weights], self._device)
        return Routes(mask, index, tokens, valid_tokens, weights, replayed, {} if record else None)

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
        """Return [tokens of the mask, layers, k], recorded by all ranks that share the rows."""
        assert routes.recorded is not None
        # Every entry is 0 on all ranks but one, so the sum contains all entries. Collectives do not support int16.
        wide = torch.uint8 if self._dtype == torch.uint8 else torch.int32
        shape = (routes.tokens, len(self._shape.sparse), self._shape.top_k)
        table = torch.zeros(shape, dtype=wide, device=self._device)
        if self._share.reports:
            for layer, selected in routes.recorded.items():
                table[self._share.own(routes.tokens), layer] = selected.to(wide)
        for group in self._share.groups:
            dist.all_reduce(table, group=group)
        return table.to("cpu", self._dtype)[routes.token_index]

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
