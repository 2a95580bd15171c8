"""The compute cost of sequences, and their partition over ranks so that every rank has about the same amount.

`karmarkar_karp` is the k-way largest differencing method (Karmarkar & Karp 1982), and with `equal_size` its balanced
form (Michiels, Korst, Aarts, van Leeuwen 2003): a heap of partial solutions, each k sums; the two with the largest
spread are merged largest-onto-smallest until one is left. The textbook version carries k sets through every merge,
O(n k); here a partial solution holds only its non-empty sums, and a set is a linked list joined in O(1). The cost of a
merge is thus proportional to the smaller side, and 100,000 lengths take about a second for any k.

Guarantees: every index exactly once, no rank empty, deterministic, sums independent of the order of the rows, heaviest
minus lightest at most the longest length, and without `equal_size` heaviest at most (4/3 - 1/(3k)) times the optimum.
`get_seqlen_balanced_partitions` never has a heavier heaviest rank than `karmarkar_karp`.
"""

from __future__ import annotations

import heapq
import json
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_SHAPE_FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")

# The sums of one partial solution, ascending: (sum of a set, first item of that set).
_Sums = list[tuple[float, int]]


def karmarkar_karp(seqlen_list: Sequence[float], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """`k_partitions` lists of indices into `seqlen_list` with nearly equal sums of lengths.

    With `equal_size` every list has exactly `len(seqlen_list) / k_partitions` indices. Indices ascend within a list,
    and the lists are ordered by their first index.
    """
    lengths = _checked_lengths(seqlen_list, k_partitions, equal_size)
    # Working on ranks in descending length makes equal lengths interchangeable: the sums do not depend on their order.
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    descending = [lengths[index] for index in order]
    sets = _LinkedSets(len(descending))
    if equal_size:
        rows = range(0, len(descending), k_partitions)
        states = [[(descending[i], i) for i in range(row + k_partitions - 1, row - 1, -1)] for row in rows]
    else:
        states = [[(length, i)] for i, length in enumerate(descending)]
    final = _difference_until_one(states, k_partitions, sets)
    partitions = [sorted(order[item] for item in sets.items(first)) for _, first in final]
    return sorted(partitions)


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[float], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """The partition to use for ranks: the better of differencing and greedy, then swaps that lower the heaviest rank.

    `karmarkar_karp` is best on most batches. If sizes must be equal and a few lengths are far above the rest,
    longest-first greedy is better: it combines them with the shortest rows. Swaps remove most of the remaining
    imbalance.
    """
    partitions = karmarkar_karp(seqlen_list, k_partitions, equal_size)
    lengths = _as_list(seqlen_list)
    if equal_size:
        candidates = (partitions, _longest_first(lengths, k_partitions))
        partitions = min(candidates, key=lambda sets: max(sum(lengths[index] for index in part) for part in sets))
    return sorted(_lower_heaviest_by_swaps(lengths, partitions))


def log_seqlen_unbalance(
    seqlen_list: Sequence[float], partitions: Sequence[Sequence[int]], prefix: str
) -> dict[str, float]:
    """Metrics: tokens per rank in the original order (contiguous chunks) and in the balanced `partitions`."""
    lengths = _as_list(seqlen_list)
    n, k = len(lengths), len(partitions)
    if k == 0:
        raise ValueError("partitions: the list is empty. Pass the lists that get_seqlen_balanced_partitions returned.")
    before = [sum(lengths[n * i // k : n * (i + 1) // k]) for i in range(k)]
    after = [sum(lengths[index] for index in partition) for partition in partitions]
    return {
        f"{prefix}/min": min(before),
        f"{prefix}/max": max(before),
        f"{prefix}/minmax_diff": max(before) - min(before),
        f"{prefix}/balanced_min": min(after),
        f"{prefix}/balanced_max": max(after),
        f"{prefix}/mean": sum(after) / k,
    }


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """The permutation that undoes `idx_map`: `reverse[idx_map[i]] == i`."""
    targets = [int(target) for target in idx_map]
    reverse = [-1] * len(targets)
    for position, target in enumerate(targets):
        if not 0 <= target < len(targets) or reverse[target] != -1:
            raise ValueError(
                f"idx_map: not a permutation of 0..{len(targets) - 1}: position {position} holds {target}, "
                "which is out of range or repeated. Pass every index exactly once."
            )
        reverse[target] = position
    return reverse


def ceildiv(a: int, b: int) -> int:
    """`a / b` rounded up, exact for any int."""
    return -(a // -b)


def roundup_divisible(a: int, b: int) -> int:
    """The smallest multiple of `b` that is at least `a`."""
    return ceildiv(a, b) * b


@dataclass(frozen=True)
class SequenceCost:
    """Floating-point operations of a forward pass: linear in tokens plus quadratic in attention.

    A backward pass takes twice as many, so ratios between sequences stay the same.
    """

    token: float
    """Operations of the layers per token."""
    head: float
    """Operations of the output layer per token with a log-prob."""
    pair: float
    """Operations of attention per pair of tokens, averaged over all pairs: a causal model masks half of them."""

    @classmethod
    def from_config(cls, fields: Mapping[str, Any]) -> SequenceCost:
        """Return the cost for a Hugging Face `config.json`; `COST_PER_TOKEN` if a usual one is missing."""
        shape = fields.get("text_config") or fields
        if any(not isinstance(shape.get(name), int) for name in _SHAPE_FIELDS):
            return COST_PER_TOKEN
        hidden, layers, heads, inner, vocab = (shape[name] for name in _SHAPE_FIELDS)
        head_dim = shape.get("head_dim") or hidden // heads
        kv_heads = shape.get("num_key_value_heads") or heads
        experts = shape.get("num_experts_per_tok") or 0
        if experts:
            inner = experts * (shape.get("moe_intermediate_size") or inner)
        weights = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
        return cls(token=2.0 * layers * weights, head=2.0 * hidden * vocab, pair=2.0 * layers * heads * head_dim)

    @classmethod
    def from_folder(cls, folder: str | Path, overrides: Mapping[str, Any] | None = None) -> SequenceCost:
        """Return the cost for the model in a local folder, with `overrides` of its `config.json`.

        `COST_PER_TOKEN` if the folder has no such file.
        """
        file = Path(folder) / "config.json"
        if not file.is_file():
            return COST_PER_TOKEN
        return cls.from_config({**json.loads(file.read_text()), **(overrides or {})})

    def __call__(self, tokens: Any, response_tokens: Any = 0) -> np.ndarray:
        """Return float64 [n] for sequences of `tokens` [n], of which `response_tokens` [n] have a log-prob."""
        tokens = np.asarray(tokens, dtype=np.float64)
        responses = np.asarray(response_tokens, dtype=np.float64)
        return tokens * self.token + responses * self.head + tokens**2 * self.pair


# For models whose shape is not known: every token costs the same.
COST_PER_TOKEN = SequenceCost(token=1.0, head=0.0, pair=0.0)


class _LinkedSets:
    """Disjoint sets of 0..n-1 as linked lists; each is named by its first item, and joining two is O(1)."""

    def __init__(self, n: int) -> None:
        self._next = [-1] * n
        self._last = list(range(n))

    def join(self, first: int, other: int) -> int:
        self._next[self._last[first]] = other
        self._last[first] = self._last[other]
        return first

    def items(self, first: int) -> Iterable[int]:
        while first != -1:
            yield first
            first = self._next[first]


def _difference_until_one(states: list[_Sums], k: int, sets: _LinkedSets) -> _Sums:
    """Merge the two partial solutions of largest spread until one remains."""
    # The given states wait in sorted order; only merged ones enter the heap, which therefore stays small (about n / k).
    waiting = sorted(((-_spread(state, k), age, state) for age, state in enumerate(states)), reverse=True)
    merged: list[tuple[float, int, _Sums]] = []
    for age in range(len(states), 2 * len(states) - 1):
        pair = [
            heapq.heappop(merged) if merged and (not waiting or merged[0] < waiting[-1]) else waiting.pop()
            for _ in range(2)
        ]
        state = _merge(pair[0][2], pair[1][2], k, sets)
        heapq.heappush(merged, (-_spread(state, k), age, state))
    return merged[0][2] if merged else waiting[0][2]


def _spread(state: _Sums, k: int) -> float:
    """Largest minus smallest of the k sums; empty sets count as 0."""
    return state[-1][0] - state[0][0] if len(state) == k else state[-1][0]


def _merge(a: _Sums, b: _Sums, k: int, sets: _LinkedSets) -> _Sums:
    """Add the largest sums of one side to the smallest (or empty) sets of the other. Changes both arguments."""
    if len(a) < len(b):
        a, b = b, a
    if len(b) == 1:  # by far the most frequent merge: one length joins a partial solution
        entry = b[0]
        if len(a) == k:
            smallest, into = a.pop(0)
            entry = (smallest + entry[0], sets.join(into, entry[1]))
        insort(a, entry)
        return a
    shared = max(0, len(a) + len(b) - k)
    joined = [
        (small + large, sets.join(into, other))
        for (small, into), (large, other) in zip(a[:shared], reversed(b[:shared]), strict=True)
    ]
    del a[:shared]
    joined += b[shared:]
    # Insert few entries into a long sorted list one by one; otherwise concatenate and sort the two sorted lists.
    if len(joined) * 8 < len(a):
        for entry in joined:
            insort(a, entry)
        return a
    a += joined
    a.sort()
    return a


def _longest_first(lengths: list[float], k: int) -> list[list[int]]:
    """Greedy with equal sizes: each length, longest first, goes to the lightest set that still has room."""
    size = len(lengths) // k
    sets: list[list[int]] = [[] for _ in range(k)]
    open_sets = [(0.0, which) for which in range(k)]
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        total, which = open_sets[0]
        sets[which].append(index)
        if len(sets[which]) < size:
            heapq.heapreplace(open_sets, (total + lengths[index], which))
        else:
            heapq.heappop(open_sets)
    return sets


def _lower_heaviest_by_swaps(lengths: list[float], partitions: list[list[int]]) -> list[list[int]]:
    """Swap one item of the heaviest set for a smaller one of another set while that lowers the larger of the two sums.

    Tries the lightest sets first, at most `_SWAP_TRIES` of them per round, and stops when the heaviest cannot be
    lowered. Set sizes never change.
    """
    # Items of each set ascending by length, so that the best counterpart of an item is found by bisection.
    sets = [sorted((lengths[index], index) for index in partition) for partition in partitions]
    by_sum = sorted((sum(length for length, _ in members), which) for which, members in enumerate(sets))
    for _ in range(_SWAP_ROUNDS_PER_SET * len(sets)):
        heavy_sum, heavy = by_sum[-1]
        for position in range(min(_SWAP_TRIES, len(by_sum) - 1)):
            light_sum, light = by_sum[position]
            swap = _best_swap(sets[heavy], sets[light], heavy_sum - light_sum)
            if swap is None:
                continue
            give, take = swap
            moved = give[0] - take[0]
            sets[heavy].remove(give)
            sets[light].remove(take)
            insort(sets[heavy], take)
            insort(sets[light], give)
            del by_sum[-1], by_sum[position]
            insort(by_sum, (heavy_sum - moved, heavy))
            insort(by_sum, (light_sum + moved, light))
            break
        else:
            break
    return [sorted(index for _, index in members) for members in sets]


_SWAP_TRIES = 8
_SWAP_ROUNDS_PER_SET = 16


def _best_swap(
    heavy: list[tuple[float, int]], light: list[tuple[float, int]], gap: float
) -> tuple[tuple[float, int], tuple[float, int]] | None:
    """The pair to exchange whose difference is nearest to half the gap; None when no difference is inside (0, gap)."""
    best, best_miss = None, gap / 2
    for give in heavy:
        wanted = give[0] - gap / 2
        at = bisect_left(light, (wanted, -1))
        for take in light[max(0, at - 1) : at + 1]:
            miss = abs(take[0] - wanted)
            if miss < best_miss:
                best, best_miss = (give, take), miss
    return best


def _checked_lengths(seqlen_list: Sequence[float], k: int, equal_size: bool) -> list[float]:
    if k < 1:
        raise ValueError(f"k_partitions: {k} is not a number of partitions. Use 1 or more.")
    lengths = _as_list(seqlen_list)
    if len(lengths) < k:
        raise ValueError(
            f"seqlen_list: {len(lengths)} sequences cannot fill {k} partitions, each needs at least one. "
            "Use a larger batch or fewer partitions."
        )
    if equal_size and len(lengths) % k:
        raise ValueError(
            f"seqlen_list: {len(lengths)} sequences do not divide into {k} partitions of equal size. "
            f"Pad the batch to {roundup_divisible(len(lengths), k)} or pass equal_size=False."
        )
    for index, length in enumerate(lengths):
        if not 0 <= length < math.inf:
            raise ValueError(f"seqlen_list: entry {index} is {length}. Lengths are finite and not negative.")
    return lengths


def _as_list(seqlen_list: Any) -> list[float]:
    """Plain Python numbers, also from a tensor or an array: exact sums and no per-item boxing later."""
    return seqlen_list.tolist() if hasattr(seqlen_list, "tolist") else list(seqlen_list)
