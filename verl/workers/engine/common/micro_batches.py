"""Split a rank's rows into micro-batches, with the same number of micro-batches on every rank."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from verl.algos.masked_ops import count_sequences
from verl.protocol import DataProto
from verl.utils.balancing import (
    COST_PER_TOKEN,
    SequenceCost,
    ceildiv,
    get_reverse_idx,
    get_seqlen_balanced_partitions,
    roundup_divisible,
)
from verl.utils.tensordicts import TensorDict
from verl.workers.engine.base import Counts, Metrics, MicroBatching
from verl.workers.engine.common.prefix_sharing import BatchPrefixTree, shared_micro_batch_rows

_Part = TypeVar("_Part")

SET_COLUMN = "together"
"""Optional column [rows]: rows with the same number form a set that is not split, even if it exceeds the limit."""


def micro_batches(
    data: DataProto,
    micro: MicroBatching,
    cost: SequenceCost,
    max_over_ranks: Callable[[int], int],
    tree: BatchPrefixTree | None = None,
) -> Iterator[tuple[DataProto, list[int] | None]]:
    """Yield each micro-batch with its row indices. `max_over_ranks` returns the maximum of a number over all ranks.
    With the prefix `tree` of the batch, rows that share tokens are kept together and limits count computed tokens.

    All ranks yield the same number of micro-batches: a rank with fewer splits its rows further, and adds fillers (with
    indices None) only if it has fewer rows (or sets, see `SET_COLUMN`) than other ranks have micro-batches.
    """
    lengths = row_lengths(data)
    together = data.batch[SET_COLUMN].tolist() if SET_COLUMN in data.batch.keys() else None

    def split(at_least: int) -> list[list[int]]:
        if tree is None:
            return micro_batch_rows(lengths, micro, cost, at_least, together)
        if together is None:
            return shared_micro_batch_rows(tree, micro, cost, at_least)
        shared = tree.shared_within(together)
        costs = (cost(lengths) - cost(shared)).tolist()
        return _split_sets(tree.budget_tokens(shared).tolist(), micro, costs, at_least, together)

    parts = split(1)
    count = max_over_ranks(len(parts))
    if len(parts) < count:
        parts = split(count)
    for rows in parts:
        yield data.select_idxs(rows), rows
    for _ in range(count - len(parts)):
        yield filler_batch(data), None


def with_last(parts: Iterator[_Part]) -> Iterator[tuple[_Part, bool]]:
    """Yield (part, whether this is the last part)."""
    previous = next(parts, None)
    for part in parts:
        if previous is not None:
            yield previous, False
        previous = part
    if previous is not None:
        yield previous, True


def micro_batch_rows(
    lengths: Sequence[int],
    micro: MicroBatching,
    cost: SequenceCost = COST_PER_TOKEN,
    at_least: int = 1,
    together: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return the row indices of each micro-batch; every row occurs once. `lengths` are tokens per row.

    With `size`, consecutive rows. With `max_tokens`, micro-batches of about equal cost in descending order, so that all
    ranks are busy for about the same time; a row over the limit forms its own micro-batch. The number of micro-batches
    is that of a best-fit packing, but `at_least` if there are enough rows. Rows with the same number in `together` are
    treated as one row.
    """
    count = len(lengths)
    if not count:
        return []
    costs = cost(lengths).tolist()
    if together is not None:
        return _split_sets(lengths, micro, costs, at_least, together)
    if micro.max_tokens is not None:
        return _split_by_budget(lengths, micro.max_tokens, costs, min(at_least, count))
    size = micro.size or count
    if ceildiv(count, size) < at_least:
        parts = min(at_least, count)
        return [list(range(count * part // parts, count * (part + 1) // parts)) for part in range(parts)]
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


def row_lengths(data: DataProto) -> list[int]:
    """Return the attended tokens of each row."""
    return data.batch["attention_mask"].sum(dim=1).tolist()


def filler_batch(data: DataProto) -> DataProto:
    """Return one row with the columns of `data`, which may be empty: one prompt token and one response token.

    A rank without further rows runs it to take part in the collectives of other ranks.
    """
    tensors = {key: torch.zeros((1, *value.shape[1:]), dtype=value.dtype) for key, value in data.batch.items()}
    responses = data.batch["responses"].shape[1] if "responses" in data.batch.keys() else 0
    first = max(0, tensors["attention_mask"].shape[1] - responses - 1)
    tensors["attention_mask"][:, first : first + 2] = 1
    return DataProto.from_dict(tensors)


def local_counts(data: DataProto) -> Counts:
    """Return the `Counts` of this rank's rows alone."""
    mask = data.batch["response_mask"] != 0
    weights = data.batch["loss_weights"] * mask if "loss_weights" in data.batch.keys() else mask
    return Counts(tokens=float(weights.sum()), sequences=float(count_sequences(mask, trajectory_tokens(data))))


def trajectory_tokens(data: DataProto) -> torch.Tensor | None:
    """Return [rows]: valid tokens of the trajectory of each row; None if each row is a whole trajectory."""
    return data.batch["trajectory_tokens"] if "trajectory_tokens" in data.batch.keys() else None


class MetricSums:
    """Sums of (sum, count) pairs on their device; copied to the host once, by `result`."""

    def __init__(self) -> None:
        self._totals: dict[str, float | torch.Tensor] = {}
        self._counts: dict[str, float | torch.Tensor] = {}  # of metrics that have a count

    def add(self, name: str, total: float | torch.Tensor, count: float | torch.Tensor | None) -> None:
        for sums, part in ((self._totals, total), (self._counts, count)):
            if part is not None:
                sums[name] = sums.get(name, 0.0) + (part.detach() if isinstance(part, torch.Tensor) else part)

    def result(self) -> Metrics:
        counts = {name: float(count) for name, count in self._counts.items()}
        return {name: (float(total), counts.get(name)) for name, total in self._totals.items()}


def _split_sets(
    lengths: Sequence[int], micro: MicroBatching, costs: Sequence[float], at_least: int, together: Sequence[int]
) -> list[list[int]]:
    """Split sets of rows by their tokens or by their number of rows, whichever `micro` limits."""
    by_number: dict[int, list[int]] = {}
    for row, number in enumerate(together):
        by_number.setdefault(number, []).append(row)
    sets = list(by_number.values())
    budget = micro.max_tokens or micro.size or len(lengths)
    sizes = [sum(lengths[row] for row in rows) if micro.max_tokens else len(rows) for rows in sets]
    set_costs = [sum(costs[row] for row in rows) for rows in sets]
    parts = _split_by_budget(sizes, budget, set_costs, min(at_least, len(sets)))
    return [[row for index in part for row in sets[index]] for part in parts]


def _split_by_budget(lengths: Sequence[int], budget: int, costs: Sequence[float], at_least: int) -> list[list[int]]:
    """Return parts of equal cost if all are within the budget, else of equal tokens, else the best-fit packing."""
    packed = _best_fit(lengths, budget)
    count = max(len(packed), at_least)
    for weights in (costs, lengths):
        parts = get_seqlen_balanced_partitions(weights, count, equal_size=False)
        if all(len(rows) == 1 or sum(lengths[row] for row in rows) <= budget for rows in parts):
            break
    else:
        parts = packed
    # Neighbours of similar length need little padding if the model runs with padding.
    parts = [sorted(rows, key=lambda row: (-lengths[row], row)) for rows in parts]
    return sorted(parts, key=lambda rows: (-sum(costs[row] for row in rows), rows))


def _best_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Pack rows by best fit, longest first: each row into the fullest part with enough space. Near-linear time.

    Returns at most 11/9 of the minimal number of parts, plus one.
    """
    parts: list[list[int]] = []
    free: list[tuple[int, int]] = []  # ascending: (free tokens, part)
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        at = bisect_left(free, (lengths[row], -1))
        if at < len(free):
            space, part = free.pop(at)
        else:
            space, part = budget, len(parts)
            parts.append([])
        parts[part].append(row)
        insort(free, (space - lengths[row], part))
    return parts


def rearrange_micro_batches(
    batch: TensorDict,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
) -> tuple[list[TensorDict], list[list[int]]]:
    """Split the rows of `batch`, which has `attention_mask`, into micro-batches of at most `max_token_len` tokens.

    Returns the micro-batches and their row indices. Their number is at least `min_num_micro_batch` and a multiple of
    `num_batches_divided_by`; with `dp_group` it is the same on every rank of the group (a collective). A row over the
    limit forms its own micro-batch.
    """
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    micro = MicroBatching(max_tokens=max_token_len)
    count = max(len(micro_batch_rows(lengths, micro)), min_num_micro_batch or 1)
    if dp_group is not None and same_micro_num_in_dp and dist.is_initialized():
        maximum = torch.tensor([count], device=batch["attention_mask"].device)
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=dp_group)
        count = int(maximum)
    if num_batches_divided_by is not None:
        count = roundup_divisible(count, num_batches_divided_by)
    if count > len(lengths):
        raise ValueError(
            f"rearrange_micro_batches: {len(lengths)} rows are fewer than {count} micro-batches. Pass at least as many"
            " rows on every rank, or a larger max_token_len."
        )
    parts = micro_batch_rows(lengths, micro, COST_PER_TOKEN, at_least=count)
    return [batch[rows] for rows in parts], parts


def prepare_dynamic_batch(
    data: DataProto, max_token_len: int, dp_group: Any = None, **options: Any
) -> tuple[list[DataProto], list[list[int]]]:
    """`rearrange_micro_batches` for a DataProto with all its columns."""
    _, parts = rearrange_micro_batches(
        TensorDict({"attention_mask": data.batch["attention_mask"]}, batch_size=[len(data)]),
        max_token_len,
        dp_group,
        **options,
    )
    return [data.select_idxs(rows) for rows in parts], parts


def restore_dynamic_batch(data: torch.Tensor, batch_idx_list: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return `data`, the concatenated results [rows, …] of the micro-batches, in the original row order."""
    order = [row for rows in batch_idx_list for row in rows]
    if len(order) != len(data):
        raise ValueError(
            f"restore_dynamic_batch: {len(data)} results for {len(order)} rows. Pass the results of all micro-batches."
        )
    return data[get_reverse_idx(order)]
