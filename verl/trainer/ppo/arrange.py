"""Which rank gets which rows: mini-batches are fixed by the order of prompts, balancing moves rows only inside them."""

from __future__ import annotations

import numpy as np

from verl.protocol import DataProto
from verl.single_controller.ray import BatchRef
from verl.utils.balancing import get_seqlen_balanced_partitions
from verl.utils.flops import TOKENS, SequenceCost


def row_costs(batch: DataProto, cost: SequenceCost = TOKENS) -> np.ndarray:
    """What every row costs a model of this shape, attention included: float64 [rows]."""
    if isinstance(batch, BatchRef) and batch.lengths is not None:
        return cost(batch.lengths.prompt + batch.lengths.response, batch.lengths.response)
    attention = batch.batch["attention_mask"]
    answers = (
        attention[:, -batch.batch["responses"].shape[1] :] if "responses" in batch.batch.keys() else attention[:, :0]
    )
    return cost(attention.sum(-1).cpu().numpy(), answers.sum(-1).cpu().numpy())


def rank_major_order(costs: np.ndarray, dp_size: int, mini_batches: int, balance: bool) -> np.ndarray:
    """Order of rows such that an equal split over `dp_size` ranks gives every rank its part of mini-batch 0, then of
    mini-batch 1 and so on: [rows].

    A mini-batch is a run of consecutive rows, whatever the number of ranks, so results do not depend on it.
    """
    rows = len(costs)
    if rows % mini_batches or (rows // mini_batches) % dp_size:
        raise ValueError(f"{rows} rows do not divide into {mini_batches} mini-batches over {dp_size} ranks.")
    size = rows // mini_batches
    per_rank: list[list[np.ndarray]] = [[] for _ in range(dp_size)]
    for start in range(0, rows, size):
        members = np.arange(start, start + size)
        parts = np.split(members, dp_size)
        if balance and dp_size > 1:
            chosen = get_seqlen_balanced_partitions(costs[members].tolist(), dp_size, equal_size=True)
            parts = [members[np.asarray(part, dtype=np.int64)] for part in chosen]
        for rank, part in enumerate(parts):
            per_rank[rank].append(part)
    return np.concatenate([part for parts in per_rank for part in parts])


def balanced_order(costs: np.ndarray, dp_size: int, balance: bool) -> np.ndarray:
    """Order of rows for a pass without an update; any number of rows."""
    if not balance or dp_size == 1 or len(costs) % dp_size:
        return np.arange(len(costs))
    return rank_major_order(costs, dp_size, mini_batches=1, balance=True)


def evenness(costs: np.ndarray, order: np.ndarray, dp_size: int, mini_batches: int) -> dict[str, float]:
    """How long ranks wait for each other in an update: the costliest rank's work over the mean, before and after.

    1 is even. Ranks meet at the end of every mini-batch, so it is taken there.
    """

    def ratio(rows: np.ndarray) -> float:
        """`rows` [mini_batches, dp_size, rows of a rank]."""
        work = costs[rows].sum(-1)
        return float(work.max(1).sum() / max(work.mean(1).sum(), 1e-12))

    shape = (mini_batches, dp_size, -1)
    return {
        "global_seqlen/max_over_mean": ratio(np.arange(len(costs)).reshape(shape)),
        "global_seqlen/balanced_max_over_mean": ratio(order.reshape(dp_size, mini_batches, -1).swapaxes(0, 1)),
    }
