"""Ulysses sequence parallelism: the ranks of a group share the tokens of a pass, and inside attention its heads.

Outside attention each rank works on its slice of the tokens. Attention needs all tokens of a sequence but not all heads
at once: an all-to-all gives every rank all tokens of some heads, a second one brings the results back (DeepSpeed
Ulysses, arXiv 2309.14509). What is found per token is gathered, so every rank sees whole sequences and computes the
same loss; each backward pass starts from its own slice, so gradients summed over all ranks count every token once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad


@dataclass(frozen=True)
class SequenceParallel:
    """This rank's place in a group that shares every sequence."""

    group: dist.ProcessGroup
    size: int
    rank: int

    def padded(self, total: int) -> int:
        """Tokens of a pass that divide over the ranks: the next multiple of their number, at least one each."""
        return max(1, math.ceil(total / self.size)) * self.size

    def part(self, padded: int) -> slice:
        """This rank's tokens."""
        width = padded // self.size
        return slice(self.rank * width, (self.rank + 1) * width)

    def exchange(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[tokens/size, heads, dim] of all heads -> [tokens, heads/size, dim] of all tokens.

        Fewer (or uneven) key and value heads are repeated to the smallest number that divides over the ranks; then
        query head i of a rank still belongs to its key head i // (query heads / key heads).
        """
        heads = math.lcm(key.shape[1], self.size)
        if query.shape[1] % self.size or query.shape[1] % heads:
            raise ValueError(
                f"ulysses_sequence_parallel_size: {self.size} ranks cannot share {query.shape[1]} query heads over "
                f"{key.shape[1]} key heads. Use a size that divides the query heads."
            )
        repeats = heads // key.shape[1]
        if repeats > 1:
            key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
        # One message for all three: [tokens/size, ranks, features of that rank's heads].
        parts = [part.reshape(part.shape[0], self.size, -1) for part in (query, key, value)]
        features = [part.shape[-1] for part in parts]
        received = _AllToAll.apply(torch.cat(parts, dim=-1).transpose(0, 1).contiguous(), self.group)
        whole = received.flatten(0, 1).split(features, dim=-1)
        q, k, v = (
            part.unflatten(-1, (-1, like.shape[-1])) for part, like in zip(whole, (query, key, value), strict=True)
        )
        return q, k, v

    def restore(self, output: torch.Tensor) -> torch.Tensor:
        """[tokens, heads/size, dim] -> [tokens/size, heads, dim]: the way back for attention's result."""
        received = _AllToAll.apply(output.unflatten(0, (self.size, -1)).contiguous(), self.group)
        return received.transpose(0, 1).flatten(1, 2)

    def gather(self, values: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """[n, ...] of each rank -> [sum(counts), ...], in the order of ranks; backward takes this rank's part only.

        `counts` says how many of each rank's first rows are wanted; the same on every rank.
        """
        width = max(1, *counts)
        values = pad(values[:width], [0, 0] * (values.dim() - 1) + [0, width - min(width, values.shape[0])])
        whole = _GatherParts.apply(values.contiguous(), self.group, self.size, self.rank)
        return torch.cat([whole[rank, :count] for rank, count in enumerate(counts)])

    def counts_of(self, positions: torch.Tensor, padded: int) -> list[int]:
        """How many of the ascending token `positions` [n] (on the host) lie in each rank's part."""
        edges = torch.arange(self.size + 1) * (padded // self.size)
        return torch.searchsorted(positions, edges).diff().tolist()


def check_heads(config: Any, size: int) -> None:
    """Refuse a model whose attention heads do not divide over `size` ranks."""
    heads = int(config.get_text_config().num_attention_heads)
    if heads % size:
        fitting = [part for part in range(1, heads + 1) if heads % part == 0]
        raise ValueError(
            f"ulysses_sequence_parallel_size: {size} does not divide the model's {heads} attention heads. "
            f"Use one of {', '.join(map(str, fitting))}."
        )


# ---------------------------------------------------------------- for code of one's own


def ulysses_pad_and_slice_inputs(
    input_ids: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    sp_size: int = 1,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """This rank's slice of packed `input_ids` [..., tokens] and `position_ids`, and how many tokens were added.

    Zeros at the end make the tokens divide. Without a `group` the ranks 0..sp_size-1, sp_size..2*sp_size-1, … share.
    """
    if sp_size < 1:
        raise ValueError(f"sp_size: {sp_size} is not a number of ranks. Use 1 or more.")
    if sp_size == 1:
        return input_ids, position_ids, 0
    tokens = input_ids.shape[-1]
    added = -tokens % sp_size
    width = (tokens + added) // sp_size
    first = dist.get_rank(group) % sp_size * width
    parts = [
        None if ids is None else pad(ids, (0, added))[..., first : first + width] for ids in (input_ids, position_ids)
    ]
    assert parts[0] is not None
    return parts[0], parts[1], added


def gather_outputs_and_unpad(
    x: torch.Tensor,
    gather_dim: int,
    unpad_dim: int | None = None,
    padding_size: int = 0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The slices of all ranks joined along `gather_dim`, without the last `padding_size` entries of `unpad_dim`.

    `unpad_dim` is `gather_dim` unless given; `group` the ranks that share, all unless given. Backward takes this rank's
    part of the gradient only: right where every rank computes the same loss and gradients are summed over ranks.
    """
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        whole = _GatherParts.apply(x.contiguous(), group, dist.get_world_size(group), dist.get_rank(group))
        x = torch.cat(whole.unbind(0), dim=gather_dim)
    if padding_size == 0:
        return x
    dim = gather_dim if unpad_dim is None else unpad_dim
    return x.narrow(dim, 0, x.shape[dim] - padding_size)


# ---------------------------------------------------------------- collectives with a gradient


class _AllToAll(torch.autograd.Function):
    """Part i of `x` [ranks, ...] goes to rank i; part j of the result came from rank j. Its own transpose."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_to_all(gradients[0].contiguous(), ctx.group), None


class _GatherParts(torch.autograd.Function):
    """[...] of every rank -> [ranks, ...]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup | None, size: int, rank: int) -> torch.Tensor:
        ctx.rank = rank
        whole = x.new_empty((size, *x.shape))
        dist.all_gather(list(whole.unbind(0)), x, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gradients[0][ctx.rank], None, None, None


def _all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received
