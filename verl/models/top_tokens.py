"""The likeliest tokens of a model at every place, straight from hidden states: logits exist for a chunk at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from verl.models.fused_head import (
    RowStatistics,
    empty_statistics,
    logit_chunks,
    rows_per_chunk,
    scaled_,
    statistics_into,
)
from verl.models.heads import LogitAdjustment


class TopTokens(NamedTuple):
    """At every place of N."""

    log_probs: torch.Tensor
    """[N]: of the label."""
    ids: torch.Tensor
    """[N, K] int64: the likeliest tokens, the likeliest first."""
    top_log_probs: torch.Tensor
    """[N, K]: theirs."""


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
    shared_by: dist.ProcessGroup | None = None,
    first: int = 0,
) -> TopTokens:
    """As `label_statistics` without gradients, and beside it the K = `k` likeliest tokens (all, of a smaller head).

    Where ranks of a group share the vocabulary, `first` is where this rank's part begins.
    """
    adjust, width = adjust or LogitAdjustment(), min(k, len(weight))
    planes = empty_statistics(hidden, weight)
    top, ids = planes.new_empty(len(hidden), width), labels.new_empty(len(hidden), width)
    rows = chunk_rows or rows_per_chunk(len(hidden), len(weight), planes.itemsize, hidden.device.type)
    for part, logits in logit_chunks(hidden.contiguous(), weight, bias, rows):
        top[part], ids[part] = logits.topk(width)  # as they are: adjusting them keeps their order
        statistics_into(planes[:, part], logits, labels[part].contiguous(), temperature, adjust, with_entropy=False)
    top, statistics = scaled_(top, temperature, adjust), RowStatistics(*planes)
    if shared_by is not None:
        statistics = statistics.across(shared_by)
        top, ids = _across(top, ids + first, k, shared_by)
    return TopTokens(statistics.log_probs(), ids, statistics.log_probs_of(top))


def _across(
    top: torch.Tensor, ids: torch.Tensor, k: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest of all ranks' parts of the vocabulary, of which one may have fewer than `k` tokens."""
    missing = k - top.shape[1]
    top = torch.nn.functional.pad(top, (0, missing), value=-torch.inf)
    ids = torch.nn.functional.pad(ids, (0, missing))
    tops = [torch.empty_like(top) for _ in range(dist.get_world_size(group))]
    all_ids = [torch.empty_like(ids) for _ in tops]
    dist.all_gather(tops, top.contiguous(), group=group)
    dist.all_gather(all_ids, ids.contiguous(), group=group)
    best, places = torch.cat(tops, dim=1).topk(k)
    return best, torch.cat(all_ids, dim=1).gather(1, places)
