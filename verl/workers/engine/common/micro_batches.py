"""Split a rank's rows into micro-batches, with the same number of micro-batches on every rank."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from tensordict import TensorDict

from verl.algos.aggregate import count_sequences
from verl.protocol import DataProto
from verl.utils.balancing import (
    COST_PER_TOKEN,
    SequenceCost,
    ceildiv,
    get_reverse_idx,
    get_seqlen_balanced_partitions,
    roundup_divisible,
)
from verl.workers.engine.base import Counts, Metrics, MicroBatching

_Part = TypeVar("_Part")

TOGETHER = "together"
"""A column [rows], where a batch has it: rows of the same number are in the same micro-batch, whatever its limit."""


def micro_batches(
    data: DataProto, micro: MicroBatching, cost: SequenceCost, largest: Callable[[int], int]
) -> Iterator[tuple[DataProto, list[int] | None]]:
    """Each micro-batch with its row indices. `largest` is the most that any rank has of a number; a collective.

    All ranks give equally many: one with fewer cuts its rows into more parts, and only one that has fewer rows (or sets
    of rows that stay `TOGETHER`) than others have parts adds fillers, whose indices are None.
    """
    lengths = row_lengths(data)
    together = data.batch[TOGETHER].tolist() if TOGETHER in data.batch.keys() else None
    parts = micro_batch_rows(lengths, micro, cost, together=together)
    wanted = largest(len(parts))
    if len(parts) < wanted:
        parts = micro_batch_rows(lengths, micro, cost, at_least=wanted, together=together)
    for rows in parts:
        yield data.select_idxs(rows), rows
    for _ in range(wanted - len(parts)):
        yield filler_batch(data), None


def with_last(parts: Iterator[_Part]) -> Iterator[tuple[_Part, bool]]:
    """Each part, and whether it is the last."""
    before = next(parts, None)
    for part in parts:
        if before is not None:
            yield before, False
        before = part
    if before is not None:
        yield before, True


def micro_batch_rows(
    lengths: Sequence[int],
    micro: MicroBatching,
    cost: SequenceCost = COST_PER_TOKEN,
    at_least: int = 1,
    together: Sequence[int] | None = None,
) -> list[list[int]]:
    """Row indices of each micro-batch; every row exactly once. `lengths` are tokens per row.

    With a size, runs of rows. With a token budget, parts of about equal cost, the costliest first: what other ranks do
    at the same time then costs about the same. A row over the budget stands alone. There are as few parts as that
    takes, and `at_least` so many if there are rows for them. Rows of one number in `together` are treated as one row.
    """
    for key, value in (("size", micro.size), ("max_tokens", micro.max_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"micro batch {key}: {value} leaves no room for a row. Use 1 or more.")
    count = len(lengths)
    if not count:
        return []
    costs = cost(lengths).tolist()
    if together is not None:
        return _of_whole_sets(lengths, micro, costs, at_least, together)
    if micro.max_tokens is not None:
        return _within_budget(lengths, micro.max_tokens, costs, min(at_least, count))
    size = micro.size or count
    if ceildiv(count, size) < at_least:
        parts = min(at_least, count)
        return [list(range(count * part // parts, count * (part + 1) // parts)) for part in range(parts)]
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


def row_lengths(data: DataProto) -> list[int]:
    """Attended tokens per row."""
    return data.batch["attention_mask"].sum(dim=1).tolist()


def filler_batch(data: DataProto) -> DataProto:
    """One row like those of `data` (also of none) with as few tokens as a model needs: one of each side.

    A rank that has run out of rows still takes part in the other ranks' collectives with it.
    """
    tensors = {key: torch.zeros((1, *value.shape[1:]), dtype=value.dtype) for key, value in data.batch.items()}
    answers = data.batch["responses"].shape[1] if "responses" in data.batch.keys() else 0
    first = max(0, tensors["attention_mask"].shape[1] - answers - 1)
    tensors["attention_mask"][:, first : first + 2] = 1
    return DataProto.from_dict(tensors)


def local_counts(data: DataProto) -> Counts:
    """This rank's valid tokens (by their weights, if they have any), and its part of the trajectories that have any."""
    mask = data.batch["response_mask"] != 0
    weights = data.batch["loss_weights"] * mask if "loss_weights" in data.batch.keys() else mask
    return Counts(tokens=float(weights.sum()), sequences=float(count_sequences(mask, trajectory_tokens(data))))


def trajectory_tokens(data: DataProto) -> torch.Tensor | None:
    """[rows]: valid tokens of the whole trajectory that each row is part of; None: each row is a whole one."""
    return data.batch["trajectory_tokens"] if "trajectory_tokens" in data.batch.keys() else None


class MetricSums:
    """(sum, count) pairs added up where they are; they leave the device once, at the end."""

    def __init__(self) -> None:
        self._totals: dict[str, float | torch.Tensor] = {}
        self._counts: dict[str, float | torch.Tensor] = {}  # of those that are counted

    def add(self, name: str, total: float | torch.Tensor, count: float | torch.Tensor | None) -> None:
        for sums, part in ((self._totals, total), (self._counts, count)):
            if part is not None:
                sums[name] = sums.get(name, 0.0) + (part.detach() if isinstance(part, torch.Tensor) else part)

    def result(self) -> Metrics:
        counts = {name: float(count) for name, count in self._counts.items()}
        return {name: (float(total), counts.get(name)) for name, total in self._totals.items()}


def _of_whole_sets(
    lengths: Sequence[int], micro: MicroBatching, costs: Sequence[float], at_least: int, together: Sequence[int]
) -> list[list[int]]:
    """Both limits alike: of a set of rows, its tokens or its rows count."""
    sets: dict[int, list[int]] = {}
    for row, number in enumerate(together):
        sets.setdefault(number, []).append(row)
    rows = list(sets.values())
    budget = micro.max_tokens or micro.size or len(lengths)
    sizes = [sum(lengths[row] for row in one) if micro.max_tokens else len(one) for one in rows]
    joined = [sum(costs[row] for row in one) for one in rows]
    parts = _within_budget(sizes, budget, joined, min(at_least, len(rows)))
    return [[row for one in part for row in rows[one]] for part in parts]


def _within_budget(lengths: Sequence[int], budget: int, costs: Sequence[float], at_least: int) -> list[list[int]]:
    """Parts of equal cost where those keep the budget, else of equal tokens, else as tight packing leaves them."""
    packed = _packed(lengths, budget)
    parts = max(len(packed), at_least)
    for weights in (costs, lengths):
        found = get_seqlen_balanced_partitions(weights, parts, equal_size=False)
        if all(len(rows) == 1 or sum(lengths[row] for row in rows) <= budget for rows in found):
            break
    else:
        found = packed
    # Neighbours of similar length need little padding where a model is run padded.
    found = [sorted(rows, key=lambda row: (-lengths[row], row)) for rows in found]
    return sorted(found, key=lambda rows: (-sum(costs[row] for row in rows), rows))


def _packed(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Best fit, longest first: each row into the fullest part that has room for it; near-linear in the rows.

    At most 11/9 of the fewest possible parts, plus one.
    """
    parts: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # ascending: (tokens left, part)
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        at = bisect_left(rooms, (lengths[row], -1))
        if at < len(rooms):
            room, part = rooms.pop(at)
        else:
            room, part = budget, len(parts)
            parts.append([])
        parts[part].append(row)
        insort(rooms, (room - lengths[row], part))
    return parts


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
    parts = micro_batch_rows(lengths, micro, COST_PER_TOKEN, at_least=wanted)
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
