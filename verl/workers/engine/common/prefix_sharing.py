"""PrefixSharing: an engine computes common prefixes of rows once. Also splits such rows into micro-batches."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist

from verl.config.engine import PREFIX_MIN_SAVING
from verl.models.packing import PackedRows, packed_tokens
from verl.models.shared_prefixes import TreeAttention, TreePacking, prefix_order, share_prefixes, token_bytes
from verl.protocol import DataProto
from verl.utils.balancing import SequenceCost
from verl.workers.engine.base import Metrics, MicroBatching
from verl.workers.engine.common.routers import ROUTED_EXPERTS

# Additional cost, as a fraction of the total cost, that is accepted to balance the costs of micro-batches.
_TOLERANCE = 0.01
_BISECTIONS = 8
# Estimated overhead of a micro-batch in tokens: an additional micro-batch must avoid the repetition of more tokens.
_MICRO_BATCH_TOKENS = 1024


@dataclass(frozen=True)
class BatchPrefixTree:
    """The prefix tree of the rows of a batch, which are divided into micro-batches with a `PrefixTree` each."""

    order: np.ndarray
    """[b]: row indices in depth-first order; the other arrays have this order."""
    shared: np.ndarray
    """[b]: number of tokens that each row shares with the row before it."""
    lengths: np.ndarray
    """[b]: number of all tokens of each row."""
    responses: np.ndarray | None = None
    """[b]: number of response tokens of each row, which heads and losses process even if shared; None: no responses."""
    expands_rows: bool = False
    """Whether token budgets count all tokens of a row, because attention computes whole rows."""

    @property
    def saving(self) -> float:
        """Fraction of all tokens that need not be computed if all rows are in one micro-batch."""
        return float(self.shared.sum() / max(1, self.lengths.sum()))

    @property
    def response_tokens(self) -> np.ndarray:
        return np.zeros_like(self.lengths) if self.responses is None else self.responses

    def budget_tokens(self, shared: np.ndarray) -> np.ndarray:
        """Return [b]: the tokens of each row that count towards a token budget. `shared` [b]: its shared tokens.

        Both are ordered by row index.
        """
        lengths, responses = np.empty_like(self.lengths), np.empty_like(self.lengths)
        lengths[self.order], responses[self.order] = self.lengths, self.response_tokens
        return lengths if self.expands_rows else np.maximum(lengths - shared, responses)

    def shared_within(self, sets: Sequence[int]) -> np.ndarray:
        """Return [b], by row index: tokens shared with the previous row (in depth-first order) of the same set.

        `sets`: number of the set of each row, by row index.
        """
        shared = np.zeros_like(self.shared)
        previous: dict[int, int] = {}
        for place, row in enumerate(self.order.tolist()):
            before = previous.get(sets[row])
            if before is not None:
                shared[row] = self.shared[before + 1 : place + 1].min()
            previous[sets[row]] = place
        return shared


def shared_micro_batch_rows(
    tree: BatchPrefixTree, micro: MicroBatching, cost: SequenceCost, at_least: int = 1
) -> list[list[int]]:
    """Return the row indices of each micro-batch, in descending order of cost; every row occurs once.

    A micro-batch is a range of the depth-first order: its first row is computed completely, later rows without the
    tokens that they share with the row before. A token limit applies to the computed tokens (with `expands_rows` to all
    tokens) and, separately, to the response tokens of all rows; a row over the limit forms its own micro-batch. The
    total cost, of repeated prefixes and of the overhead per micro-batch, is minimal up to a small tolerance, within
    which the costs of micro-batches are balanced, so that all ranks are busy for about the same time. If this gives
    fewer than `at_least` micro-batches, the costliest are split, as far as there are rows.
    """
    lengths, shared = tree.lengths, tree.shared
    if micro.max_tokens is not None:
        computed = lengths if tree.expands_rows else lengths - shared
        sizes = [_RangeSums(lengths, computed), _RangeSums(tree.response_tokens, tree.response_tokens)]
    else:
        sizes = [_RangeSums(np.ones_like(lengths), np.ones_like(lengths))]
    costs = _RangeSums(cost(lengths), cost(lengths) - cost(shared))
    limit = micro.max_tokens or micro.size or len(lengths)
    within_limit = np.maximum.reduce([size.earliest_starts(limit) for size in sizes])
    cuts = _cheapest_cuts(within_limit, costs, float(cost(_MICRO_BATCH_TOKENS)), min(at_least, len(lengths)))
    parts = sorted(pairwise(cuts), key=lambda part: (-costs.of(*part), part))
    return [tree.order[first:end].tolist() for first, end in parts]


class _RangeSums:
    """Sums over ranges of rows: the first row of a range counts as its value in `full`, later rows as in `added`."""

    def __init__(self, full: np.ndarray, added: np.ndarray) -> None:
        self.repeated = full.astype(np.float64) - added
        """Additional cost of a row as the first of a range."""
        self.sums = np.concatenate([[0.0], added.cumsum()])

    def of(self, first: int, end: int) -> float:
        return float(self.sums[end] - self.sums[first] + self.repeated[first])

    def earliest_starts(self, limit: float) -> np.ndarray:
        """Return for every end 1, …, rows the first row of the longest range of at most `limit`; at least one row."""
        # of(first, end) does not increase with `first`.
        keys = self.sums[:-1] - self.repeated
        starts = np.searchsorted(keys, self.sums[1:] - limit * (1 + 1e-12), side="left")
        return np.minimum(starts, np.arange(len(keys)))


def _cheapest_cuts(within_limit: np.ndarray, costs: _RangeSums, overhead: float, at_least: int) -> list[int]:
    """Return the boundaries of the ranges: 0, …, number of rows.

    `within_limit`: the earliest start of a range by its end. `overhead`: cost of a range beside its rows.
    """
    cuts, repeated = _least_repeated(within_limit, costs, overhead)
    most = max(at_least, len(cuts) - 1)
    allowed = repeated + _TOLERANCE * costs.sums[-1]
    low, high = 0.0, max(costs.of(*part) for part in pairwise(cuts))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        candidate, repeated = _least_repeated(np.maximum(within_limit, costs.earliest_starts(middle)), costs, overhead)
        if len(candidate) - 1 <= most and repeated <= allowed:
            cuts, high = candidate, middle
        else:
            low = middle
    while len(cuts) - 1 < at_least:
        cuts = _split_costliest(costs, cuts)
    return cuts


def _least_repeated(starts: np.ndarray, costs: _RangeSums, overhead: float) -> tuple[list[int], float]:
    """Return the boundaries with the least cost of repeated prefixes and of ranges, and that cost.

    `starts`: the earliest start of a range by its end, see `earliest_starts`; it does not decrease. The best start of a
    range is therefore a minimum over a sliding window.
    """
    repeated = costs.repeated.tolist()
    total, previous = [0.0], [0]  # by the end of a range: the least cost, and the start of the last range
    candidates: deque[tuple[float, int]] = deque()  # (cost, start) that may still be best, in ascending order
    for start, earliest in enumerate(starts.tolist()):
        cost = total[start] + repeated[start] + overhead
        while candidates and candidates[-1][0] > cost:
            candidates.pop()
        candidates.append((cost, start))
        while candidates[0][1] < earliest:
            candidates.popleft()
        total.append(candidates[0][0])
        previous.append(candidates[0][1])
    cuts = [len(starts)]
    while cuts[-1]:
        cuts.append(previous[cuts[-1]])
    return cuts[::-1], total[-1]


def _split_costliest(costs: _RangeSums, cuts: list[int]) -> list[int]:
    """Split the costliest range with several rows in two, as evenly as possible."""
    ranges = [part for part in pairwise(cuts) if part[1] - part[0] > 1]
    first, end = max(ranges, key=lambda part: (costs.of(*part), part))
    middle = min(range(first + 1, end), key=lambda cut: (max(costs.of(first, cut), costs.of(cut, end)), cut))
    return sorted([*cuts, middle])


logger = logging.getLogger(__name__)


def supported_mode(mode: str, obstacle: str | None) -> str:
    """Return `mode`; with an `obstacle`, the reason why the engine cannot share prefixes, return false and log the
    obstacle if the mode is auto, and raise ValueError if it is true."""
    if obstacle is None or mode == "false":
        return mode
    if mode == "true":
        raise ValueError(f"use_prefix_grouper: prefixes cannot be shared: {obstacle}. Set it to auto or False.")
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.info("use_prefix_grouper=auto: prefixes are not shared: %s", obstacle)
    return "false"


class PrefixSharing:
    """Decides for each pass of an engine whether prefixes are shared, and applies it to every micro-batch."""

    def __init__(
        self,
        mode: str,
        cost: SequenceCost,
        expands_rows: bool = False,
        replays_experts: bool = False,
        compiled: bool = False,
    ) -> None:
        """`mode`: true, false or auto. `cost`: operations of a row. `replays_experts`: tokens are shared only if their
        `routed_experts` agree.

        `expands_rows`: attention has no kernel for shared tokens and computes whole rows. Token budgets then count all
        tokens of a row, because attention needs as much memory as without sharing; only other operations are saved.

        `compiled`: layers are compiled, separately for prefix trees and for other rows. A pass then uses trees for all
        its micro-batches, so that one without shared tokens does not cause a compilation.
        """
        self.mode = mode
        self.expands_rows = expands_rows
        self._cost = cost
        self.attention: TreeAttention | None = None
        """Implementation of attention; None: selected by size."""
        self._replays_experts = replays_experts
        self._compiled = compiled
        self._active = False
        self.row_tokens = self.computed_tokens = 0
        """Tokens of the current pass: of all rows, and those computed."""
        self._row_work = self._saved_work = 0.0

    def begin(self, data: DataProto) -> BatchPrefixTree | None:
        """Start a pass over `data`. Returns the prefix tree of its rows; None if prefixes are not shared."""
        self.row_tokens = self.computed_tokens = 0
        self._row_work = self._saved_work = 0.0
        self._active = False
        if self.mode == "false":
            return None
        tree = replace(build_prefix_tree(data, self._experts(data)), expands_rows=self.expands_rows)
        self._active = tree.saving > 0 and (self.mode == "true" or tree.saving >= PREFIX_MIN_SAVING)
        return tree if self._active else None

    def apply(self, rows: PackedRows, part: DataProto, filler: bool = False) -> PackedRows:
        """Return the packed rows of micro-batch `part` with common prefixes computed once, if this pass shares them."""
        always = self._compiled and (self._active or self.mode == "true")
        if filler:
            return share_prefixes(rows, None, self.attention, True) if always and not self._replays_experts else rows
        self.row_tokens += rows.packing.total
        self._row_work += float(self._cost(rows.packing.lengths).sum()) + self._cost.head * len(rows.rows)
        if self._active or always:
            experts = self._experts(part)
            mask = None if experts is None else packed_tokens(part.batch["attention_mask"])
            rows = share_prefixes(rows, None if experts is None else experts[mask], self.attention, always)
        self.computed_tokens += rows.packing.total
        if isinstance(rows.packing, TreePacking):
            shared = rows.packing.tree.shared
            self._saved_work += float((self._cost.token * shared if self.expands_rows else self._cost(shared)).sum())
        return rows

    def metrics(self) -> Metrics:
        """Return the fractions of the tokens and of the operations of the last pass that were not computed."""
        if self.mode == "false":
            return {}
        return {
            "prefix_saving": (self.row_tokens - self.computed_tokens, max(1, self.row_tokens)),
            "prefix_saving_flops": (self._saved_work, max(1.0, self._row_work)),
        }

    def _experts(self, data: DataProto) -> torch.Tensor | None:
        """Return the replayed experts [rows, columns, layers, k]."""
        return data.batch[ROUTED_EXPERTS] if self._replays_experts and ROUTED_EXPERTS in data.batch.keys() else None


def build_prefix_tree(data: DataProto, experts: torch.Tensor | None = None) -> BatchPrefixTree:
    """Return the prefix tree of the rows. `experts` [rows, columns, ...]: tokens are shared only if these agree."""
    mask = packed_tokens(data.batch["attention_mask"])
    # One row at a time, because the bytes of all experts may need gigabytes; numpy selects tokens of a row faster than
    # torch.
    ids = data.batch["input_ids"].numpy()
    rows = []
    for row, packed in enumerate(mask.numpy()):
        row_experts = None if experts is None else experts[row].numpy()[packed]
        rows.append(token_bytes(ids[row][packed], row_experts).tobytes())
    lengths = mask.sum(dim=1).numpy()
    width = max((len(row) // int(length) for row, length in zip(rows, lengths, strict=True)), default=1)
    order, shared = prefix_order(rows, width)
    columns = data.batch["responses"].shape[1] if "responses" in data.batch.keys() else 0
    responses = data.batch["attention_mask"][:, mask.shape[1] - columns :].sum(dim=1).numpy()
    return BatchPrefixTree(order, shared, lengths[order], responses[order])
