"""Ranks as threads of one process, joined by real gloo groups: collectives in tests that take milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

Found = TypeVar("Found")


def in_threads(ranks: int, work: Callable[[int, dist.ProcessGroup], Found]) -> list[Found]:
    """What `work(rank, group)` gives on each of `ranks` ranks; a rank that fails ends the others by their timeout."""
    store = dist.HashStore()

    def run(rank: int) -> Found:
        return work(rank, dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=20)))

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))
