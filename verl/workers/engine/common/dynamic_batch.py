"""Micro-batches by token budget for users' own loops: cut as the engines cut, results put back in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from verl.protocol import DataProto
from verl.utils.balancing import get_reverse_idx, roundup_divisible
from verl.utils.flops import TOKENS
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.common.micro_batches import micro_batch_rows


def rearrange_micro_batches(
    batch: TensorDict,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
) -> tuple[list[TensorDict], list[list[int]]]:
    """The rows of `batch` (it has `attention_mask`) in parts of at most `max_token_len` tokens, and their indices.

    With `dp_group` (a collective) every rank gets as many parts as the rank that needs most, up to one per row; at
    least `min_num_micro_batch`, and a multiple of `num_batches_divided_by`. A row over the budget stands alone.
    """
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    micro = MicroBatching(max_tokens=max_token_len)
    wanted = max(len(micro_batch_rows(lengths, micro)), min_num_micro_batch or 1)
    if dp_group is not None and same_micro_num_in_dp and dist.is_initialized():
        most = torch.tensor([wanted], device=batch["attention_mask"].device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=dp_group)
        wanted = int(most)
    if num_batches_divided_by is not None:
        wanted = roundup_divisible(wanted, num_batches_divided_by)
    if wanted > len(lengths):
        raise ValueError(
            f"rearrange_micro_batches: {len(lengths)} rows cannot fill {wanted} micro-batches. Give every rank at least"
            " as many rows, or a larger max_token_len."
        )
    parts = micro_batch_rows(lengths, micro, TOKENS, at_least=wanted)
    return [batch[rows] for rows in parts], parts


def prepare_dynamic_batch(
    data: DataProto, max_token_len: int, dp_group: Any = None, **options: Any
) -> tuple[list[DataProto], list[list[int]]]:
    """As `rearrange_micro_batches`, for a DataProto with all its columns."""
    _, parts = rearrange_micro_batches(
        TensorDict({"attention_mask": data.batch["attention_mask"]}, batch_size=[len(data)]),
        max_token_len,
        dp_group,
        **options,
    )
    return [data.select_idxs(rows) for rows in parts], parts


def restore_dynamic_batch(data: torch.Tensor, batch_idx_list: Sequence[Sequence[int]]) -> torch.Tensor:
    """Results [rows, …] of the parts end to end, back in the order of the rows."""
    order = [row for rows in batch_idx_list for row in rows]
    if len(order) != len(data):
        raise ValueError(f"restore_dynamic_batch: {len(data)} results for {len(order)} rows. Join those of all parts.")
    return data[get_reverse_idx(order)]
