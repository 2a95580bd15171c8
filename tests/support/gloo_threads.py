"""Ranks as threads of one process with real gloo groups: tests of collectives that take milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

Result = TypeVar("Result")


def run_ranks_in_threads(ranks: int, work: Callable[[int, dist.ProcessGroup], Result]) -> list[Result]:
    """Return `work(rank, group)` of every rank. After a failure on one rank the others time out."""
    store = dist.HashStore()

    def run(rank: int) -> Result:
        return work(rank, dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=20)))

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))
