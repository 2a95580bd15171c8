"""How rows go to loop workers: no row is there only to fill up a shard, for agents act on the world."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from verl.protocol import DataProto
from verl.single_controller.base.dispatch import Group, PerRank, Shard, join_results

__all__ = ["SPLIT_ROWS"]


def split_rows(group: Group, data: DataProto, *others: Any) -> PerRank:
    """Neighbouring rows to each rank, as evenly as they divide; other arguments to all."""
    if not len(data):
        raise ValueError("the batch is empty: there is nothing to split over the ranks.")
    edges = np.linspace(0, len(data), group.world_size + 1).round().astype(int)
    shards = [Shard(data[int(start) : int(end)]) for start, end in pairwise(edges)]
    return [shards, *([other] * group.world_size for other in others)], {}


SPLIT_ROWS: Mapping[str, Callable[..., Any]] = {"dispatch_fn": split_rows, "collect_fn": join_results}
