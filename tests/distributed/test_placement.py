"""Placement over several Ray nodes (all on this machine): rank order, one placement group per node, merged pools."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from verl.single_controller.base import ResourcePool
from verl.single_controller.ray import RayResourcePool, merge_resource_pool
from verl.single_controller.ray.resource_pool import LostRanks, RayNode, address_key, pools_fit

# A cluster of several nodes cannot share a process with the session's own, hence the subprocess.
PROGRAM = """
import ray
from ray.cluster_utils import Cluster
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray import ResourceError, merge_resource_pool
from tests.support.workers import Counter

class Placed(Counter):
    def where(self):
        return ray.get_runtime_context().get_node_id(), self.rank, self.local_rank, self.local_world_size

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 100 * 2**20})
cluster.add_node(num_cpus=2, object_store_memory=100 * 2**20)
ray.init(address=cluster.address, log_to_driver=False)

order = sorted(node["NodeID"] for node in ray.nodes())  # same address, so by id
pool = RayResourcePool([1, 2], use_gpu=False)
with RayWorkerGroup(pool, RayClassWithInitArgs(Placed)) as group:
    places = group.execute_all_sync("where")
assert places == [(order[0], 0, 0, 1), (order[1], 1, 0, 2), (order[1], 2, 1, 2)], places
assert len(pool.get_placement_groups()) == 2

single = RayResourcePool([1], use_gpu=False)
merged = merge_resource_pool(single, RayResourcePool([1], use_gpu=False))
assert merged.world_size == 2 and merged.get_placement_groups()[0] is single.get_placement_groups()[0]

try:
    RayResourcePool([1, 1, 1], use_gpu=False).get_placement_groups()
    raise SystemExit("three nodes were had from two")
except ResourceError as error:
    assert "needs 3 node(s)" in str(error) and "has 2 node(s)" in str(error), error
pool.release()
ray.shutdown()
cluster.shutdown()
print("placement ok")
"""


@pytest.mark.slow
def test_ranks_follow_the_order_of_nodes_and_bundles():
    # This kind of cluster notes its address for others to join: not where the machine's own programs look. A short
    # path, since Ray's sockets lie below it and their names may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(PROGRAM)],
            capture_output=True,
            text=True,
            timeout=180,
            env={**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1", "RAY_TMPDIR": folder},
            cwd=Path(__file__).parent,
            check=False,
        )
    assert "placement ok" in done.stdout, done.stdout + done.stderr


def test_pools_count_their_ranks():
    pool = ResourcePool([2, 3])
    assert pool.world_size == 5
    assert pool.local_rank_list() == [0, 1, 0, 1, 2]
    assert pool.local_world_size_list() == [2, 2, 3, 3, 3]
    with pytest.raises(ValueError, match=r"node 1 .*\b0 processes"):
        ResourcePool([2, 0])
    with pytest.raises(ValueError, match=r"^merge_resource_pool: .*use_gpu, max_colocate_count"):
        merge_resource_pool(RayResourcePool([1], use_gpu=False), RayResourcePool([1], use_gpu=True))


def test_addresses_sort_as_numbers():
    addresses = ["10.0.0.10", "10.0.0.9", "head.local", "9.1.1.1"]
    assert sorted(addresses, key=address_key) == ["9.1.1.1", "10.0.0.9", "10.0.0.10", "head.local"]


def test_pools_share_nodes_but_no_gpu():
    def nodes(*free: float) -> list[RayNode]:
        return [RayNode(str(i), f"10.0.0.{i}", 8, gpus) for i, gpus in enumerate(free)]

    assert pools_fit([[8, 8]], True, nodes(8, 8))
    assert not pools_fit([[8, 8]], True, nodes(8, 7))
    assert pools_fit([[8, 8]], True, [node.without_jobs() for node in nodes(8, 7)])
    assert not pools_fit([[8, 8]], True, nodes(16)), "two entries are two nodes"
    assert pools_fit([[4, 4], [2, 2]], True, nodes(8, 6))
    assert not pools_fit([[4, 4], [4]], True, nodes(7, 7))
    assert pools_fit([[2, 2], [2, 2]], False, nodes(0, 0))
    assert not pools_fit([[1, 1]], False, nodes(0))


def test_lost_nodes_are_named_with_their_ranks():
    assert LostRanks({"10.0.0.2": [4, 5, 6, 7]}).describe("actor") == "node 10.0.0.2 is lost, with ranks 4-7 of actor"
    several = LostRanks({"10.0.0.1": [0], "10.0.0.3": [2, 3]})
    said = "node 10.0.0.1 is lost, with rank 0 of critic; node 10.0.0.3 is lost, with ranks 2-3 of critic"
    assert several.describe("critic") == said
