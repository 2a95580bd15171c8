"""Assignment of rows to ranks (balancing moves rows only within a mini-batch); column selection and concatenation.

Rows of a prompt are kept on one rank where computing their common prefix once lowers the cost of the busiest rank. The
controller does not have the tokens of a batch: it estimates common prefixes from the groups and lengths of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from verl.algos.groups import Trajectories
from verl.config.engine import PREFIX_MIN_SAVING
from verl.protocol import DataProto, object_array
from verl.single_controller.ray import BatchRef
from verl.types.schema import COLUMNS, Call, columns_read_by
from verl.utils.balancing import COST_PER_TOKEN, SequenceCost, ceildiv, get_seqlen_balanced_partitions


@dataclass(frozen=True)
class BalancedRows:
    """An order of rows to send. Split into equal parts, one per rank, each part has rows of mini-batch 0, 1, and so
    on."""

    order: np.ndarray
    """[sent]: index in the batch of each row to send."""
    filler: np.ndarray
    """[sent], bool: a copy of a row of the same mini-batch, sent to make the ranks' parts equal."""
    sizes: list[int]
    """Number of rows per rank, for each mini-batch."""

    def take(self, batch: DataProto, names: Sequence[str]) -> DataProto:
        """Return the rows to send, with the named tensors. Filler rows get `response_mask` 0; if trajectories have
        several rows, `trajectory_tokens` is added, computed from the current mask."""
        order, trajectories = torch.from_numpy(self.order), Trajectories.of(batch)
        sent = batch.select(list(names), []).select_idxs(self.order)
        if self.filler.any():
            mask = batch.batch["response_mask"][order]
            mask[torch.from_numpy(self.filler)] = 0
            sent.batch["response_mask"] = mask
        if not trajectories.one_row_each:
            sent.batch["trajectory_tokens"] = trajectories.tokens()[order]
        return sent

    def restore_order(self, results: DataProto) -> DataProto:
        """Return the results for the sent rows in the order of the batch, without fillers."""
        real = np.flatnonzero(~self.filler)
        return results.select_idxs(real[np.argsort(self.order[real])])

    def on_ranks(self, ranks: int) -> list[np.ndarray]:
        """Return, per mini-batch, the rows of each rank: [ranks, rows]."""
        return np.split(self.order.reshape(ranks, -1), np.cumsum(self.sizes)[:-1], axis=1)


def row_costs(batch: DataProto, cost: SequenceCost = COST_PER_TOKEN) -> np.ndarray:
    """Return the compute cost of every row, including attention: float64 [rows]. `cost`: the function of the model."""
    if isinstance(batch, BatchRef) and batch.lengths is not None:
        return cost(batch.lengths.prompt + batch.lengths.response, batch.lengths.response)
    attention = batch.batch["attention_mask"]
    width = batch.batch["responses"].shape[1] if "responses" in batch.batch.keys() else 0
    responses = attention[:, attention.shape[1] - width :]
    return cost(attention.sum(-1).cpu().numpy(), responses.sum(-1).cpu().numpy())


def mini_batches_by_prompt(uids: Sequence[str] | np.ndarray, prompts: int) -> list[np.ndarray]:
    """Return the rows of each mini-batch: all rows of `prompts` consecutive prompts. `uids` [rows]: prompt of each
    row."""
    _, first, inverse = np.unique(np.asarray(uids).astype(str), return_index=True, return_inverse=True)
    number = np.argsort(np.argsort(first))[inverse.reshape(-1)]
    return [np.flatnonzero(number // prompts == mini) for mini in range(ceildiv(len(first), prompts))]


def shared_costs(batch: DataProto, costs: np.ndarray, cost: SequenceCost, uids: np.ndarray) -> SharedCosts | None:
    """Return the costs that rows of a prompt (`uids` [rows]) share; None if the batch has no responses, or if keeping
    these rows together saves too little."""
    if isinstance(batch, BatchRef) and batch.lengths is not None:
        prompts = np.asarray(batch.lengths.prompt)
    elif "responses" not in batch.batch.keys():
        return None
    else:
        width = batch.batch["responses"].shape[1]
        prompts = batch.batch["attention_mask"][:, :-width].sum(-1).cpu().numpy()
    trajectories = batch.non_tensor_batch.get("trajectory")
    numbers = (
        np.arange(len(batch)) if trajectories is None else np.unique(trajectories.astype(str), return_inverse=True)[1]
    )
    shared = SharedCosts.estimate(costs, cost, prompts, uids, numbers.reshape(-1))
    return shared if shared.worthwhile else None


def balance_rows(
    costs: np.ndarray,
    mini_batches: Sequence[np.ndarray],
    ranks: int,
    balance: bool,
    shared: SharedCosts | None = None,
) -> BalancedRows:
    """Distribute the rows of every mini-batch over the ranks, in equal numbers and, with `balance`, with similar cost.

    With `shared`, rows of a prompt are kept on one rank where that lowers the cost. If the number of rows is not
    divisible by `ranks`, copies of the cheapest row are added as fillers.
    """
    per_rank: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    fillers: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    for members in mini_batches:
        missing = -len(members) % ranks
        filled = np.concatenate([members, np.repeat(members[np.argmin(costs[members])], missing)])
        parts: Sequence[Sequence[int] | np.ndarray] = np.split(np.arange(len(filled)), ranks)
        if balance and ranks > 1 and shared is not None:
            parts = place_groups(shared.select(filled, missing), ranks)
        elif balance and ranks > 1:
            parts = get_seqlen_balanced_partitions(costs[filled].tolist(), ranks, equal_size=True)
        for rank, part in enumerate(parts):
            places = np.asarray(part, dtype=np.int64)
            per_rank[rank].append(filled[places])
            fillers[rank].append(places >= len(members))
    order = np.concatenate([part for parts in per_rank for part in parts])
    filler = np.concatenate([part for parts in fillers for part in parts])
    return BalancedRows(order, filler, [len(part) for part in per_rank[0]])


def balance_metrics(
    costs: np.ndarray,
    mini_batches: Sequence[np.ndarray],
    balanced: BalancedRows,
    ranks: int,
    shared: SharedCosts | None = None,
) -> dict[str, float]:
    """Return the largest cost of a rank over the mean cost, without and with balancing; 1 is perfectly balanced.
    With `shared`, prefixes that rows of a rank share count once.

    It is computed per mini-batch, since ranks synchronize at the end of each.
    """

    def ratio(minis: list[list[np.ndarray]]) -> float:
        """`minis`: per mini-batch, the rows of every rank."""
        cost_of = (lambda rows: costs[rows].sum()) if shared is None else shared.total
        work = np.array([[cost_of(rows) for rows in parts] for parts in minis])
        return float(work.max(1).sum() / max(work.mean(1).sum(), 1e-12))

    return {
        "global_seqlen/max_over_mean": ratio([np.array_split(members, ranks) for members in mini_batches]),
        "global_seqlen/balanced_max_over_mean": ratio([list(parts) for parts in balanced.on_ranks(ranks)]),
    }


def select_columns_for(batch: DataProto, *calls: Call) -> DataProto:
    """Return the columns that these calls read, without metadata."""
    names = columns_read_by(*calls)
    tensors, objects = batch.batch.keys(), batch.non_tensor_batch
    return batch.select([n for n in names if n in tensors], [n for n in names if n in objects], [])


def local_columns(batch: DataProto, names: Iterable[str], objects: Iterable[str] | None = None) -> DataProto:
    """Return the named columns that the batch has, on the controller. `objects`: names of object columns; None: all."""
    arrays = batch.non_tensor_batch
    tensors = {name: batch.batch[name] for name in names if name in batch.batch.keys()}
    kept = {name: arrays[name] for name in (arrays if objects is None else objects) if name in arrays}
    return DataProto.from_dict(tensors, kept, batch.meta_info)


def concat_rows(parts: Sequence[DataProto], pad_token_id: int) -> DataProto:
    """Concatenate batches that may be padded to different widths (BatchRefs are padded when they are read). An object
    column that a part lacks is None in its rows: columns of agents and rewards differ."""
    if len(parts) == 1:
        return parts[0]
    parts = _with_same_objects(parts)
    if not isinstance(parts[0], BatchRef) and "responses" in parts[0].batch.keys():
        sizes = [(part.batch["prompts"].shape[1], part.batch["responses"].shape[1]) for part in parts]
        width = [max(widths) for widths in zip(*sizes, strict=True)]
        parts = [_padded(part, size, width, pad_token_id) for part, size in zip(parts, sizes, strict=True)]
    return DataProto.concat(parts)


def concat_prompts(parts: Sequence[DataProto]) -> DataProto:
    """Concatenate batches of prompts without responses. Batches of a checkpoint may have another width
    (`data.max_prompt_length`) and other columns: all are padded to the widest, and missing object columns are None."""
    parts = _with_same_objects(parts)
    widths = {part.batch["input_ids"].shape[1] for part in parts if "input_ids" in part.batch.keys()}
    if len(widths) > 1:
        width = max(widths)
        parts = [_padded(part, (part.batch["input_ids"].shape[1], 0), (width, 0), 0) for part in parts]
    return DataProto.concat(parts)


def _with_same_objects(parts: Sequence[DataProto]) -> Sequence[DataProto]:
    names = {name for part in parts for name in part.non_tensor_batch}
    if all(names == set(part.non_tensor_batch) for part in parts):
        return parts
    parts = [part.select() for part in parts]
    for part in parts:
        for name in names - set(part.non_tensor_batch):
            part.non_tensor_batch[name] = object_array([None] * len(part))
    return parts


def _padded(part: DataProto, size: Sequence[int], width: Sequence[int], pad_token_id: int) -> DataProto:
    """Pad prompts on the left and responses on the right, from `size` to `width`, both (prompt, response)."""
    left, right = width[0] - size[0], width[1] - size[1]
    sides = {"prompt": (left, 0), "response": (0, right), "sequence": (left, right)}
    wider = part.select()
    for name, value in part.batch.items() if left or right else ():
        if name in COLUMNS and COLUMNS[name].axis in sides:
            fill = pad_token_id if (filler := COLUMNS[name].filler) is None else filler
            wider.batch[name] = torch.nn.functional.pad(value, sides[COLUMNS[name].axis], value=fill)
    return wider


@dataclass(frozen=True)
class SharedCosts:
    """Costs of rows. Rows of a group that are on the same rank share the cost of their common prefix."""

    costs: np.ndarray
    """[rows]: cost of a row alone."""
    saved: np.ndarray
    """[rows]: cost of the prefix that a row shares with the other rows of its group."""
    groups: np.ndarray
    """[rows]: number of its group."""

    @staticmethod
    def estimate(
        costs: np.ndarray, cost: SequenceCost, prompts: np.ndarray, uids: np.ndarray, trajectories: np.ndarray
    ) -> SharedCosts:
        """Estimate the shared prefixes: rows with the same uid share the shortest of their prompts; a later row of a
        trajectory shares the prompt of the previous row.

        `prompts` [rows]: prompt tokens; `uids`, `trajectories` [rows]: prompt and trajectory of each row.
        """
        _, groups = np.unique(np.asarray(uids).astype(str), return_inverse=True)
        groups = groups.reshape(-1)
        shortest = np.full(groups.max(initial=-1) + 1, np.iinfo(np.int64).max)
        np.minimum.at(shortest, groups, prompts)
        shared = shortest[groups]
        order = np.argsort(trajectories, kind="stable")
        follows = np.flatnonzero(trajectories[order][1:] == trajectories[order][:-1])
        before, after = order[follows], order[follows + 1]
        shared[after] = np.maximum(shared[after], np.minimum(prompts[before], prompts[after]))
        return SharedCosts(costs, cost(shared), groups)

    def select(self, rows: np.ndarray, fillers: int = 0) -> SharedCosts:
        """Return these rows. The last `fillers` of them are copies, which cost nothing on a rank with the original."""
        saved = self.saved[rows].copy()
        if fillers:
            saved[-fillers:] = self.costs[rows[-fillers:]]
        return SharedCosts(self.costs[rows], saved, self.groups[rows])

    @property
    def worthwhile(self) -> bool:
        """Whether keeping groups together saves enough."""
        return self.total(np.arange(len(self.costs))) <= (1 - PREFIX_MIN_SAVING) * self.costs.sum()

    def total(self, rows: np.ndarray) -> float:
        """Return the cost of these rows on one rank: every group computes its shared part once."""
        groups, inverse = np.unique(self.groups[rows], return_inverse=True)
        once = np.full(len(groups), np.inf)
        np.minimum.at(once, inverse.reshape(-1), self.saved[rows])
        return float((self.costs[rows] - self.saved[rows]).sum() + once.sum())


def place_groups(shared: SharedCosts, ranks: int) -> list[list[int]]:
    """Distribute the rows over the ranks in equal numbers, with the lowest cost of the busiest rank.

    Compares two placements: rows balanced one by one, and groups placed whole, costliest first, on the cheapest rank
    with enough space; a group that fits nowhere is split.
    """
    by_row = get_seqlen_balanced_partitions(shared.costs.tolist(), ranks, equal_size=True)
    by_group = _place_whole_groups(shared, ranks)

    def busiest(parts: list[list[int]]) -> float:
        return max(shared.total(np.array(part)) for part in parts)

    return min((by_group, by_row), key=busiest)


def _place_whole_groups(shared: SharedCosts, ranks: int) -> list[list[int]]:
    size = len(shared.costs) // ranks
    order = np.argsort(shared.groups, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(shared.groups[order])) + 1)
    parts: list[list[int]] = [[] for _ in range(ranks)]
    costs = [0.0] * ranks
    for rows in sorted(groups, key=lambda rows: (-shared.total(rows), rows[0])):
        remaining = rows
        while len(remaining):
            free = [rank for rank in range(ranks) if len(parts[rank]) < size]
            fitting = [rank for rank in free if size - len(parts[rank]) >= len(remaining)]
            # A group that fits nowhere is split; the rank with the most space takes the first part, to get few parts.
            rank = min(fitting, key=costs.__getitem__) if fitting else min(free, key=lambda rank: len(parts[rank]))
            placed, remaining = np.split(remaining, [min(len(remaining), size - len(parts[rank]))])
            parts[rank] += placed.tolist()
            costs[rank] += shared.total(placed)
    return [sorted(part) for part in parts]
