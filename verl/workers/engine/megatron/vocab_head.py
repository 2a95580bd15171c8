"""Log-probabilities and entropies of a vocabulary that tensor-parallel ranks share: logits are never gathered."""

from __future__ import annotations

import torch
import torch.distributed as dist

from verl.models.fused_head import label_statistics
from verl.models.heads import LogitAdjustment


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
    """Of `labels` [N] at `hidden` [N, H], both the same on every rank of `tp_group` (None: one rank has all).

    `weight` [V, H] are this rank's rows of the output layer, which begin at `vocab_start`; rows from `vocab_size` on
    are padding: no token, and no gradient. The gradient of `hidden` is whole on every rank.
    """
    real = max(0, min(len(weight), vocab_size - vocab_start))
    return label_statistics(
        hidden,
        weight if real == len(weight) else weight[:real],
        labels - vocab_start,
        temperature,
        with_entropy,
        adjust=adjust,
        chunk_rows=chunk_rows,
        shared_by=tp_group,
    )
