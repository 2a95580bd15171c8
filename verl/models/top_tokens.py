"""The most likely tokens at every position, computed from hidden states in chunks of logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from verl.models.fused_head import (
    RowStatistics,
    empty_statistics,
    logit_chunks,
    rows_per_chunk,
    scale_logits_,
    write_statistics,
)
from verl.models.heads import LogitAdjustment


class TopTokens(NamedTuple):
    """The most likely tokens at N positions."""

    log_probs: torch.Tensor
    """[N]: log-probs of the labels."""
    ids: torch.Tensor
    """[N, K] int64: the most likely tokens in descending order."""
    top_log_probs: torch.Tensor
    """[N, K]: their log-probs."""


@torch.no_grad()
def top_tokens(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    adjust: LogitAdjustment | None = None,
    chunk_rows: int | None = None,
    vocab_group: dist.ProcessGroup | None = None,
    first: int = 0,
) -> TopTokens:
    """Like `label_statistics` without gradients, and the K = `k` most likely tokens (all, if the head has fewer).

    `first`: with `vocab_group`, the first token id of this rank's part of the vocabulary.
    """
    adjust, width = adjust or LogitAdjustment(), min(k, len(weight))
    out = empty_statistics(hidden, weight)
    top, ids = out.new_empty(len(hidden), width), labels.new_empty(len(hidden), width)
    rows = chunk_rows or rows_per_chunk(len(hidden), len(weight), out.itemsize, hidden.device.type)
    for part, logits in logit_chunks(hidden.contiguous(), weight, bias, rows):
        top[part], ids[part] = logits.topk(width)  # the adjustment is monotonic
        write_statistics(out[:, part], logits, labels[part].contiguous(), temperature, adjust, with_entropy=False)
    top, statistics = scale_logits_(top, temperature, adjust), RowStatistics(*out)
    if vocab_group is not None:
        statistics = statistics.all_reduce(vocab_group)
        top, ids = _gather_top(top, ids + first, k, vocab_group)
    return TopTokens(statistics.log_probs(), ids, statistics.log_probs_of(top))


def _gather_top(
    top: torch.Tensor, ids: torch.Tensor, k: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the top k over all ranks' parts of the vocabulary; a part may have fewer than `k` tokens."""
    missing = k - top.shape[1]
    top = torch.nn.functional.pad(top, (0, missing), value=-torch.inf)
    ids = torch.nn.functional.pad(ids, (0, missing))
    tops = [torch.empty_like(top) for _ in range(dist.get_world_size(group))]
    all_ids = [torch.empty_like(ids) for _ in tops]
    dist.all_gather(tops, top.contiguous(), group=group)
    dist.all_gather(all_ids, ids.contiguous(), group=group)
    best, index = torch.cat(tops, dim=1).topk(k)
    return best, torch.cat(all_ids, dim=1).gather(1, index)
