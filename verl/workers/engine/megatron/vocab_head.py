"""Log-probs and entropies of a vocabulary that is split over tensor-parallel ranks; logits are never gathered."""

from __future__ import annotations

import torch
import torch.distributed as dist

from verl.models.fused_head import label_statistics
from verl.models.heads import LogitAdjustment
from verl.models.top_tokens import TopTokens, top_tokens


def vocab_parallel_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    with_entropy: bool,
    *,
    tp_group: dist.ProcessGroup | None,
    vocab_start: int,
    vocab_size: int,
    adjust: LogitAdjustment | None = None,
    chunk_rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probs and entropies of `labels` [N] or [N, K] at `hidden` [N, H], equal on all ranks of the group.

    `tp_group` None: one rank has the whole vocabulary. `weight` [V, H] are this rank's rows of the output layer from
    `vocab_start` on; rows from `vocab_size` on are padding without gradient. The gradient of `hidden` is complete on
    every rank.
    """
    return label_statistics(
        hidden,
        _without_padding(weight, vocab_start, vocab_size),
        labels - vocab_start,
        temperature,
        with_entropy,
        adjust=adjust,
        chunk_rows=chunk_rows,
        vocab_group=tp_group,
    )


def vocab_parallel_top_tokens(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    k: int,
    *,
    tp_group: dist.ProcessGroup | None,
    vocab_start: int,
    vocab_size: int,
    adjust: LogitAdjustment | None = None,
) -> TopTokens:
    """Return the `k` most likely tokens, without gradients; arguments as in `vocab_parallel_statistics`."""
    return top_tokens(
        hidden,
        _without_padding(weight, vocab_start, vocab_size),
        labels - vocab_start,
        temperature,
        k,
        adjust=adjust,
        vocab_group=tp_group,
        first=vocab_start,
    )


def _without_padding(weight: torch.Tensor, vocab_start: int, vocab_size: int) -> torch.Tensor:
    """Return the rows of real tokens."""
    rows = max(0, min(len(weight), vocab_size - vocab_start))
    return weight if rows == len(weight) else weight[:rows]
