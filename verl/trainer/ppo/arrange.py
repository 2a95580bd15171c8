"""Which rank gets which rows: mini-batches are whole prompts in the batch's order, balancing moves rows inside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from verl.algos.trajectories import Trajectories
from verl.protocol import DataProto, object_array
from verl.single_controller.ray import BatchRef
from verl.types.schema import COLUMNS
from verl.utils.balancing import COST_PER_TOKEN, SequenceCost, ceildiv, get_seqlen_balanced_partitions


@dataclass(frozen=True)
class Arrangement:
    """Rows in an order such that an equal split gives every rank its part of mini-batch 0, then of 1 and so on."""

    order: np.ndarray
    """[sent]: which row of the batch is sent there."""
    filler: np.ndarray
    """[sent], bool: sent only to make the ranks' parts equal; it is another time in the same mini-batch."""
    sizes: list[int]
    """The rows that each rank has of every mini-batch."""

    def take(self, batch: DataProto, names: Sequence[str]) -> DataProto:
        """The rows to send, of the named tensors, and what they weigh by the masks as they are now: fillers nothing,
        rows of trajectories with several by `trajectory_tokens`."""
        order, whole = torch.from_numpy(self.order), Trajectories.of(batch)
        sent = batch.select(list(names), []).select_idxs(self.order)
        if self.filler.any():
            mask = batch.batch["response_mask"][order]
            mask[torch.from_numpy(self.filler)] = 0
            sent.batch["response_mask"] = mask
        if not whole.one_row_each:
            sent.batch["trajectory_tokens"] = whole.tokens()[order]
        return sent

    def results(self, sent: DataProto) -> DataProto:
        """What came back for the rows sent, in the batch's order and without fillers."""
        real = np.flatnonzero(~self.filler)
        return sent.select_idxs(real[np.argsort(self.order[real])])

    def on_ranks(self, ranks: int) -> list[np.ndarray]:
        """The rows of each mini-batch as the ranks have them: [ranks, rows]."""
        return np.split(self.order.reshape(ranks, -1), np.cumsum(self.sizes)[:-1], axis=1)


def row_costs(batch: DataProto, cost: SequenceCost = COST_PER_TOKEN) -> np.ndarray:
    """What every row costs a model of this shape, attention included: float64 [rows]."""
    if isinstance(batch, BatchRef) and batch.lengths is not None:
        return cost(batch.lengths.prompt + batch.lengths.response, batch.lengths.response)
    attention = batch.batch["attention_mask"]
    answers = (
        attention[:, -batch.batch["responses"].shape[1] :] if "responses" in batch.batch.keys() else attention[:, :0]
    )
    return cost(attention.sum(-1).cpu().numpy(), answers.sum(-1).cpu().numpy())


def mini_batches_by_prompt(uids: Sequence[str] | np.ndarray, prompts: int) -> list[np.ndarray]:
    """The rows of each mini-batch: those of the first `prompts` prompts, of the next ones and so on; `uids` [rows]."""
    _, first, inverse = np.unique(np.asarray(uids).astype(str), return_index=True, return_inverse=True)
    number = np.argsort(np.argsort(first))[inverse.reshape(-1)]
    return [np.flatnonzero(number // prompts == mini) for mini in range(ceildiv(len(first), prompts))]


def arrange(costs: np.ndarray, mini_batches: Sequence[np.ndarray], ranks: int, balance: bool) -> Arrangement:
    """The rows of every mini-batch in equal numbers on all ranks, as even in cost as may be where `balance` is set.

    Where they do not divide, the cheapest row fills up. A mini-batch is the same whatever the number of ranks, so
    results do not depend on it.
    """
    per_rank: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    fillers: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    for members in mini_batches:
        missing = -len(members) % ranks
        filled = np.concatenate([members, np.repeat(members[np.argmin(costs[members])], missing)])
        parts: Sequence[Sequence[int] | np.ndarray] = np.split(np.arange(len(filled)), ranks)
        if balance and ranks > 1:
            parts = get_seqlen_balanced_partitions(costs[filled].tolist(), ranks, equal_size=True)
        for rank, part in enumerate(parts):
            places = np.asarray(part, dtype=np.int64)
            per_rank[rank].append(filled[places])
            fillers[rank].append(places >= len(members))
    order, filler = (np.concatenate([part for parts in each for part in parts]) for each in (per_rank, fillers))
    return Arrangement(order, filler, [len(part) for part in per_rank[0]])


def evenness(
    costs: np.ndarray, mini_batches: Sequence[np.ndarray], arrangement: Arrangement, ranks: int
) -> dict[str, float]:
    """How long ranks wait for each other in an update: the costliest rank's work over the mean, before and after.

    1 is even. Ranks meet at the end of every mini-batch, so it is taken there.
    """

    def ratio(minis: list[list[np.ndarray]]) -> float:
        """`minis`: of each mini-batch the rows of every rank."""
        work = np.array([[costs[rows].sum() for rows in parts] for parts in minis])
        return float(work.max(1).sum() / max(work.mean(1).sum(), 1e-12))

    return {
        "global_seqlen/max_over_mean": ratio([np.array_split(members, ranks) for members in mini_batches]),
        "global_seqlen/balanced_max_over_mean": ratio([list(parts) for parts in arrangement.on_ranks(ranks)]),
    }


def concat_rows(parts: Sequence[DataProto], pad_token_id: int) -> DataProto:
    """One batch of all rows, whatever width each part is padded to. Batches by reference pad when they are read. An
    object column that a part does not have is None in its rows: what agents and rewards say differs."""
    if len(parts) == 1:
        return parts[0]
    parts = _with_same_objects(parts)
    if not isinstance(parts[0], BatchRef) and "responses" in parts[0].batch.keys():
        sizes = [(part.batch["prompts"].shape[1], part.batch["responses"].shape[1]) for part in parts]
        width = [max(each) for each in zip(*sizes, strict=True)]
        parts = [_widened(part, size, width, pad_token_id) for part, size in zip(parts, sizes, strict=True)]
    return DataProto.concat(parts)


def concat_prompts(parts: Sequence[DataProto]) -> DataProto:
    """One batch of prompts that have no answers. Those from before a restart may have had another
    `data.max_prompt_length`, and other columns: all are padded to the widest, and have None for what they lack."""
    parts = _with_same_objects(parts)
    widths = {part.batch["input_ids"].shape[1] for part in parts if "input_ids" in part.batch.keys()}
    if len(widths) > 1:
        width = max(widths)
        parts = [_widened(part, (part.batch["input_ids"].shape[1], 0), (width, 0), 0) for part in parts]
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


def _widened(part: DataProto, size: Sequence[int], width: Sequence[int], pad_token_id: int) -> DataProto:
    """Prompts padded on the left and responses on the right, from `size` to `width`: both (prompt, response)."""
    left, right = width[0] - size[0], width[1] - size[1]
    sides = {"prompt": (left, 0), "response": (0, right), "sequence": (left, right)}
    wider = part.select()
    for name, value in part.batch.items() if left or right else ():
        if name in COLUMNS and COLUMNS[name].axis in sides:
            blank = pad_token_id if (filler := COLUMNS[name].filler) is None else filler
            wider.batch[name] = torch.nn.functional.pad(value, sides[COLUMNS[name].axis], value=blank)
    return wider
