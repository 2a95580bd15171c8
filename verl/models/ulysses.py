"""Ulysses sequence parallelism: the ranks of a group divide the tokens of a pass, and inside attention the heads.

Outside attention each rank computes its slice of the tokens. Attention needs all tokens of a sequence but not all
heads: an all-to-all gives every rank all tokens of some heads, a second one restores the slices (DeepSpeed Ulysses,
arXiv 2309.14509). Per-token results are gathered, so that every rank computes the loss of whole sequences; the backward
pass of each rank starts from its own slice, so gradients summed over all ranks count every token once.
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
    """A sequence-parallel group and this rank's position in it."""

    group: dist.ProcessGroup
    size: int
    rank: int

    def padded(self, total: int) -> int:
        """Return the number of tokens padded to a multiple of the group size, at least one per rank."""
        return max(1, math.ceil(total / self.size)) * self.size

    def part(self, padded: int) -> slice:
        """Return the slice of this rank's tokens."""
        width = padded // self.size
        return slice(self.rank * width, (self.rank + 1) * width)

    def exchange(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Exchange heads for tokens: [tokens/size, heads, dim] of all heads -> [tokens, heads/size, dim] of all tokens.

        Key and value heads are repeated to the smallest number that the group size divides; query head i of a rank
        still belongs to its key head i // (query heads / key heads).
        """
        heads = math.lcm(key.shape[1], self.size)
        if query.shape[1] % self.size or query.shape[1] % heads:
            raise ValueError(
                f"ulysses_sequence_parallel_size: {self.size} ranks cannot divide {query.shape[1]} query heads with "
                f"{key.shape[1]} key heads. Use a size that divides the query heads."
            )
        repeats = heads // key.shape[1]
        if repeats > 1:
            key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
        # One collective for all three tensors: [tokens/size, ranks, features of that rank's heads].
        parts = [part.reshape(part.shape[0], self.size, -1) for part in (query, key, value)]
        features = [part.shape[-1] for part in parts]
        received = _AllToAll.apply(torch.cat(parts, dim=-1).transpose(0, 1).contiguous(), self.group)
        whole = received.flatten(0, 1).split(features, dim=-1)
        q, k, v = (
            part.unflatten(-1, (-1, like.shape[-1])) for part, like in zip(whole, (query, key, value), strict=True)
        )
        return q, k, v

    def restore(self, output: torch.Tensor) -> torch.Tensor:
        """Inverse of `exchange` for the attention output: [tokens, heads/size, dim] -> [tokens/size, heads, dim]."""
        received = _AllToAll.apply(output.unflatten(0, (self.size, -1)).contiguous(), self.group)
        return received.transpose(0, 1).flatten(1, 2)

    def gather(self, values: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Concatenate [n, ...] of all ranks to [sum(counts), ...]; the backward pass returns this rank's part.

        `counts`: number of leading rows of each rank that are used; the same on every rank.
        """
        width = max(1, *counts)
        values = pad(values[:width], [0, 0] * (values.dim() - 1) + [0, width - min(width, values.shape[0])])
        whole = _GatherParts.apply(values.contiguous(), self.group, self.size, self.rank)
        return torch.cat([whole[rank, :count] for rank, count in enumerate(counts)])

    def counts_per_rank(self, positions: torch.Tensor, padded: int) -> list[int]:
        """Count the ascending token `positions` [n] (on the host) in each rank's slice."""
        edges = torch.arange(self.size + 1) * (padded // self.size)
        return torch.searchsorted(positions, edges).diff().tolist()


def check_heads(config: Any, size: int) -> None:
    """Raise ValueError if `size` does not divide the attention heads of a model."""
    heads = int(config.get_text_config().num_attention_heads)
    if heads % size:
        divisors = [part for part in range(1, heads + 1) if heads % part == 0]
        raise ValueError(
            f"ulysses_sequence_parallel_size: {size} does not divide the model's {heads} attention heads. "
            f"Use one of {', '.join(map(str, divisors))}."
        )


# ---------------------------------------------------------------- public functions for user code


def ulysses_pad_and_slice_inputs(
    input_ids: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    sp_size: int = 1,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Return this rank's slice of packed `input_ids` [..., tokens] and `position_ids`, and the padding in tokens.

    The end is padded with zeros. By default the groups are the ranks 0..sp_size-1, sp_size..2*sp_size-1, …
    """
    if sp_size < 1:
        raise ValueError(f"sp_size: {sp_size} is not positive. Use 1 or more.")
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
    """Concatenate the slices of all ranks along `gather_dim`, without the last `padding_size` entries of `unpad_dim`.

    `unpad_dim` defaults to `gather_dim`, `group` to all ranks. The backward pass returns only this rank's part of the
    gradient, which is correct if every rank computes the same loss and gradients are summed over ranks.
    """
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        whole = _GatherParts.apply(x.contiguous(), group, dist.get_world_size(group), dist.get_rank(group))
        x = torch.cat(whole.unbind(0), dim=gather_dim)
    if padding_size == 0:
        return x
    dim = gather_dim if unpad_dim is None else unpad_dim
    return x.narrow(dim, 0, x.shape[dim] - padding_size)


# ---------------------------------------------------------------- differentiable collectives


class _AllToAll(torch.autograd.Function):
    """Send part i of `x` [ranks, ...] to rank i; part j of the result is from rank j. The transpose of itself."""

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
