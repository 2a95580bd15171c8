"""Slabs of weights that exceed a bucket, such as the packed experts of a layer: few rows, each of them large."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl.workers.engine.common.groups import ensure_process_group
from verl.workers.engine.fsdp.weights import ModelWeights, Slab

EXPERTS, IN, OUT = 5, 3, 4
EXPERT_BYTES = 2 * IN * OUT  # in bfloat16


class PackedExperts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.Parameter(torch.arange(EXPERTS * IN * OUT, dtype=torch.float32).view(EXPERTS, IN, OUT))
        self.router = torch.nn.Parameter(torch.zeros(EXPERTS, IN))


def buckets_of(max_bytes: int, requested: Any) -> list[dict[Any, torch.Tensor]]:
    ensure_process_group(torch.device("cpu"))
    weights = ModelWeights(PackedExperts(), None, torch.device("cpu"))
    return list(weights.buckets(torch.bfloat16, max_bytes, requested))


@pytest.mark.parametrize(
    ("experts_per_bucket", "slabs"), [(0.5, [1, 1, 1, 1, 1]), (1, [1, 1, 1, 1, 1]), (2.5, [2, 2, 1]), (4, [4, 1])]
)
def test_packed_experts_are_sent_in_as_many_as_fit_into_a_bucket(experts_per_bucket, slabs):
    max_bytes = int(experts_per_bucket * EXPERT_BYTES)
    buckets = buckets_of(max_bytes, [{"experts": range(EXPERTS)}])
    assert all(sum(part.nbytes for part in bucket.values()) <= max(max_bytes, EXPERT_BYTES) for bucket in buckets)
    parts = [(key, part) for bucket in buckets for key, part in bucket.items()]
    assert [(key.start, key.stop) for key, _ in parts] == [
        (sum(slabs[:number]), sum(slabs[: number + 1])) for number in range(len(slabs))
    ]
    assert torch.equal(torch.cat([part for _, part in parts]), PackedExperts().experts.bfloat16())


@pytest.mark.parametrize("max_bytes", [EXPERTS * EXPERT_BYTES, 1 << 20])
def test_packed_experts_that_fit_are_sent_whole(max_bytes):
    buckets = buckets_of(max_bytes, [{"experts": range(EXPERTS), "router": range(EXPERTS)}])
    assert [set(bucket) for bucket in buckets] == (
        [{"experts", "router"}] if max_bytes > EXPERTS * EXPERT_BYTES else [{"experts"}, {"router"}]
    )


def test_without_requests_a_weight_is_not_divided():
    assert [set(bucket) for bucket in buckets_of(1, None)] == [{"experts"}, {"router"}]


@pytest.mark.parametrize("rows", [1, 5, 7, 8, 9])
@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("rows_per_bucket", [1, 3, 5, 8])
def test_slabs_of_shards_hold_each_row_once_and_know_their_size(rows, shards, rows_per_bucket):
    value = SimpleNamespace(shape=(rows, IN, OUT), ndim=3, numel=lambda: rows * IN * OUT)
    whole = Slab("experts", value, torch.bfloat16)
    max_bytes = rows_per_bucket * EXPERT_BYTES

    def sharded(slab: Slab) -> Slab:
        vars(slab)["shards"] = shards  # instead of a mesh of real ranks
        return slab

    slabs = [sharded(slab) for slab in sharded(whole).split(max_bytes)]
    held = [row for slab in slabs for shard in range(shards) for row in slab.rows_of(shard)]
    assert sorted(held) == list(range(rows))
    for slab in slabs:
        assert slab.nbytes == EXPERT_BYTES * sum(len(slab.rows_of(shard)) for shard in range(shards))
        assert slab.nbytes <= max(max_bytes, shards * EXPERT_BYTES)
