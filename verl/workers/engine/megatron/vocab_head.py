"""Log-probabilities and entropies of a vocabulary that tensor-parallel ranks share: logits are never gathered."""

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
    """Of `labels` [N] or [N, K] at `hidden` [N, H], both the same on every rank of `tp_group` (None: one rank has all).

    `weight` [V, H] are this rank's rows of the output layer, which begin at `vocab_start`; rows from `vocab_size` on
    are padding: no token, and no gradient. The gradient of `hidden` is whole on every rank.
    """
    return label_statistics(
        hidden,
        _real(weight, vocab_start, vocab_size),
        labels - vocab_start,
        temperature,
        with_entropy,
        adjust=adjust,
        chunk_rows=chunk_rows,
        shared_by=tp_group,
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
    """The same of the `k` likeliest tokens, without gradients."""
    weight = _real(weight, vocab_start, vocab_size)
    return top_tokens(
        hidden,
        weight,
        labels - vocab_start,
        temperature,
        k,
        adjust=adjust,
        shared_by=tp_group,
        first=vocab_start,
    )


def _real(weight: torch.Tensor, vocab_start: int, vocab_size: int) -> torch.Tensor:
    """The rows that stand for tokens."""
    real = max(0, min(len(weight), vocab_size - vocab_start))
    return weight if real == len(weight) else weight[:real]
