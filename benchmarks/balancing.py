"""Length balancing at 100,000 sequences: time and imbalance beside greedy, plain chunks and the lower bound.

    python benchmarks/balancing.py [--n 100000 1024] [--json results.jsonl]

Imbalance is heaviest rank / mean - 1: the share of every step that the other ranks wait. The bound is what no method
can beat: a rank holds the longest row (with equal sizes also the shortest others), and no rank is below the mean.
"""

from __future__ import annotations

import argparse
import heapq
import math
import time
from collections.abc import Callable

import numpy as np
from _report import report

from verl.utils.balancing import get_seqlen_balanced_partitions, karmarkar_karp

Partition = list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, nargs="+", default=[100_000, 1024], help="sequences (rounded down to divide)")
    parser.add_argument("--json", default=None, help="append the JSON line to this file")
    args = parser.parse_args()
    for n in args.n:
        rows = []
        for name, lengths in length_sets(n).items():
            for k in (8, 64, 512):
                for equal_size in (False, True):
                    rows += measure(name, lengths[: n // k * k], k, equal_size)
        report(f"length balancing, {n} sequences", rows, args.json)


def length_sets(n: int) -> dict[str, list[int]]:
    rng = np.random.default_rng(0)
    return {
        "lognormal": np.clip(rng.lognormal(6.0, 1.0, n), 1, 16384).astype(int).tolist(),
        "uniform": rng.integers(1, 4097, n).tolist(),
        # A few rows thousands of times longer than most, sorted: the worst for chunks and for equal sizes.
        "adversarial": sorted(np.clip(rng.pareto(1.1, n) * 16 + 1, 1, 131072).astype(int).tolist()),
    }


def measure(name: str, lengths: list[int], k: int, equal_size: bool) -> list[dict[str, object]]:
    methods: dict[str, Callable[[], Partition]] = {
        "balanced (used)": lambda: get_seqlen_balanced_partitions(lengths, k, equal_size),
        "karmarkar_karp": lambda: karmarkar_karp(lengths, k, equal_size),
        "contiguous chunks": lambda: contiguous(len(lengths), k),
    }
    if not equal_size:
        methods["greedy (heapq)"] = lambda: greedy(lengths, k)
    mean = sum(lengths) / k
    beside_longest = sum(sorted(lengths)[: len(lengths) // k - 1]) if equal_size else 0
    bound = max(max(lengths) + beside_longest, math.ceil(mean)) / mean - 1
    rows: list[dict[str, object]] = []
    for method, run in methods.items():
        began = time.perf_counter()
        partition = run()
        seconds = time.perf_counter() - began
        heaviest = max(sum(lengths[index] for index in part) for part in partition)
        rows.append(
            {
                "lengths": name,
                "k": k,
                "sizes": "equal" if equal_size else "free",
                "method": method,
                "seconds": round(seconds, 4),
                "imbalance_%": 100 * (heaviest / mean - 1),
                "bound_%": 100 * bound,
            }
        )
    return rows


def greedy(lengths: list[int], k: int) -> Partition:
    """Longest first onto the lightest rank."""
    parts: Partition = [[] for _ in range(k)]
    heap = [(0, rank) for rank in range(k)]
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        total, rank = heap[0]
        parts[rank].append(index)
        heapq.heapreplace(heap, (total + lengths[index], rank))
    return parts


def contiguous(n: int, k: int) -> Partition:
    return [list(range(n * rank // k, n * (rank + 1) // k)) for rank in range(k)]


if __name__ == "__main__":
    main()
