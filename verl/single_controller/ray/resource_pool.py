"""RayResourcePool: nodes and devices of worker groups, by placement groups; ResourcePoolManager: pools by role."""

from __future__ import annotations

import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from verl.single_controller.base.worker_group import ResourcePool, WorkerDiedError
from verl.utils.network import accepts_connections
from verl.utils.resources import load_factor

logger = logging.getLogger(__name__)

# A bundle must not be empty. With one byte of memory and no CPU, any number of processes fits on a node.
_MINIMAL_BUNDLE = {"memory": 1.0}
_READY_TIMEOUT_S = 120.0
_READY_POLL_S = 10.0
_DEFAULT_POOL = "global_pool"


class ResourceError(ValueError):
    """The cluster does not have the requested resources."""


@dataclass(frozen=True)
class RayNode:
    """An alive Ray node."""

    node_id: str
    address: str
    total_gpus: float
    free_gpus: float

    def without_jobs(self) -> RayNode:
        """The node with all its GPUs free."""
        return replace(self, free_gpus=self.total_gpus)


@dataclass(frozen=True)
class StartedRanks:
    """Running actors of all ranks of a pool, for its next worker group. `prefix`: prefix of the actors' names."""

    prefix: str
    actors: list[Any]


class RayResourcePool(ResourcePool):
    """Processes on Ray nodes: `process_on_nodes=[2, 2]` is two ranks on each of two nodes, ranks 0 and 1 on the first.

    With `use_gpu` every rank has a GPU, which up to `max_colocate_count` groups of this pool share; without, nothing is
    reserved. Nodes are used in the order of their addresses.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        self.use_gpu = use_gpu
        self.name_prefix = name_prefix or "pool"
        self.detached = detached
        self._placement_groups: list[PlacementGroup] | None = None
        self._nodes: list[RayNode] = []
        self.started: StartedRanks | None = None
        """Processes that run already (see `start_early`) and that no worker group uses yet."""

    def get_placement_groups(self) -> list[PlacementGroup]:
        """The placement groups of the pool, one per node, created on first use. Raises ResourceError if that fails."""
        if self._placement_groups is None:
            self._nodes = choose_nodes(self.store, self.use_gpu, self.name_prefix)
            self._placement_groups = [
                self._place(i, count, node) for i, (count, node) in enumerate(zip(self.store, self._nodes, strict=True))
            ]
            self._wait_until_ready(self._placement_groups)
        return self._placement_groups

    def nodes_by_rank(self) -> list[RayNode]:
        """The node of every rank; empty before the placement groups exist."""
        return [node for node, count in zip(self._nodes, self.store, strict=True) for _ in range(count)]

    def take_started(self) -> StartedRanks | None:
        """Return the processes that run already, for a worker group; None if there are none."""
        started, self.started = self.started, None
        return started

    def release(self) -> None:
        """Remove the placement groups, which kills the actors in them."""
        self.started = None
        for group in self._placement_groups or []:
            remove_placement_group(group)
        self._placement_groups = None

    def _place(self, number: int, count: int, node: RayNode) -> PlacementGroup:
        return placement_group(
            [{"GPU": 1.0} if self.use_gpu else dict(_MINIMAL_BUNDLE) for _ in range(count)],
            strategy="STRICT_PACK",
            name=f"{self.name_prefix}-{uuid.uuid4().hex[:6]}:{number}",  # another run may use the same prefix
            lifetime="detached" if self.detached else None,
            bundle_label_selector=[{"ray.io/node-id": node.node_id}] * count,
        )

    def _wait_until_ready(self, groups: list[PlacementGroup]) -> None:
        waiting = [group.ready() for group in groups]
        timeout = _READY_TIMEOUT_S * load_factor()
        deadline = time.monotonic() + timeout
        while waiting := ray.wait(waiting, num_returns=len(waiting), timeout=_READY_POLL_S)[1]:
            if (lost := lost_ranks(self.nodes_by_rank())) is not None:
                self.release()
                raise WorkerDiedError(
                    lost.describe(self.name_prefix), self.name_prefix, lost.first, lost.address, "start"
                )
            if time.monotonic() > deadline:
                self.release()
                raise ResourceError(
                    f"resource pool {self.name_prefix!r}: {len(waiting)} of {len(groups)} node(s) could not be reserved"
                    f" in {timeout:.0f} s. {describe_cluster()} Another job may use them: see `ray status`."
                )


@dataclass
class ResourcePoolManager:
    """Pools by name (`{"global_pool": [8, 8]}`: processes per node) and the pool of every role.

    `process_on_nodes=[8, 8]` instead of `resource_pool_spec` is one pool; without `mapping` all roles use it.
    """

    resource_pool_spec: dict[str, list[int]] = field(default_factory=dict)
    mapping: Mapping[Hashable, str] = field(default_factory=dict)
    use_gpu: bool = True
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)
    process_on_nodes: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if bool(self.resource_pool_spec) == (self.process_on_nodes is not None):
            raise ValueError(
                "ResourcePoolManager: pass either resource_pool_spec ({pool: [processes per node]}) or process_on_nodes"
                " ([processes per node], one pool for all roles)."
            )
        if self.process_on_nodes is not None:
            names = set(self.mapping.values()) or {_DEFAULT_POOL}
            if len(names) > 1:
                raise ValueError(
                    f"ResourcePoolManager: process_on_nodes is one pool, but mapping names {sorted(names)}. Pass"
                    " resource_pool_spec instead."
                )
            self.resource_pool_spec = {names.pop(): list(self.process_on_nodes)}
        if not self.mapping:
            if len(self.resource_pool_spec) > 1:
                raise ValueError(
                    f"ResourcePoolManager: mapping is missing. With several pools ({sorted(self.resource_pool_spec)})"
                    " it assigns one to every role."
                )
            (only,) = self.resource_pool_spec
            self.mapping = defaultdict(lambda: only)
        for role, pool in self.mapping.items():
            if pool not in self.resource_pool_spec:
                raise ValueError(
                    f"ResourcePoolManager: mapping assigns the pool {pool!r} to {role}, but resource_pool_spec has only"
                    f" {sorted(self.resource_pool_spec)}."
                )

    def create_resource_pool(self) -> None:
        """Create a pool for every name that a role uses. Starting a group in a pool reserves its devices."""
        used = set(self.mapping.values()) or set(self.resource_pool_spec)
        for name, processes in self.resource_pool_spec.items():
            if name in used and name not in self.resource_pool_dict:
                self.resource_pool_dict[name] = RayResourcePool(processes, self.use_gpu, name_prefix=name)

    def get_resource_pool(self, role: Hashable) -> RayResourcePool:
        """The pool of a role."""
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Number of devices (without GPUs: of processes) of all pools."""
        return sum(sum(processes) for processes in self.resource_pool_spec.values())

    def release(self) -> None:
        """Release all pools."""
        for pool in self.resource_pool_dict.values():
            pool.release()
        self.resource_pool_dict.clear()


def merge_resource_pool(a: RayResourcePool, b: RayResourcePool) -> RayResourcePool:
    """One pool over the nodes and devices of both, ranks of `a` first."""
    if (a.use_gpu, a.max_colocate_count, a.detached) != (b.use_gpu, b.max_colocate_count, b.detached):
        raise ValueError("merge_resource_pool: the pools differ in use_gpu, max_colocate_count or detached.")
    merged = RayResourcePool(
        a.store + b.store, a.use_gpu, f"{a.name_prefix}+{b.name_prefix}", a.max_colocate_count, a.detached
    )
    merged._placement_groups = a.get_placement_groups() + b.get_placement_groups()
    merged._nodes = a._nodes + b._nodes
    return merged


def choose_nodes(process_on_nodes: Sequence[int], use_gpu: bool, name: str) -> list[RayNode]:
    """A node for each entry, in the order of addresses. Raises ResourceError if the cluster has too few."""
    nodes = alive_nodes()
    chosen = _assign_nodes(process_on_nodes, use_gpu, nodes)
    if chosen is None:
        raise ResourceError(_missing_resources(process_on_nodes, use_gpu, name, nodes))
    return chosen


def pools_fit(pools: Sequence[Sequence[int]], use_gpu: bool, nodes: Sequence[RayNode]) -> bool:
    """Whether all pools fit on these nodes together: they may share nodes, but not GPUs."""
    free = {node.node_id: node for node in nodes}
    for pool in pools:
        chosen = _assign_nodes(pool, use_gpu, list(free.values()))
        if chosen is None:
            return False
        for count, node in zip(pool, chosen, strict=True):
            free[node.node_id] = replace(node, free_gpus=node.free_gpus - count)
    return True


def _assign_nodes(process_on_nodes: Sequence[int], use_gpu: bool, nodes: Sequence[RayNode]) -> list[RayNode] | None:
    chosen: list[RayNode] = []
    for count in process_on_nodes:
        fitting = [node for node in nodes if node not in chosen and (not use_gpu or node.free_gpus >= count)]
        if not fitting:
            return None
        chosen.append(fitting[0])
    return chosen


def alive_nodes() -> list[RayNode]:
    """The reachable nodes of the cluster, ordered by address, then id.

    Ray takes up to a minute to notice a lost node, so each node is also probed.
    """
    free = ray._private.state.available_resources_per_node()
    nodes = [
        RayNode(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["Resources"].get("GPU", 0.0),
            free.get(node["NodeID"], {}).get("GPU", 0.0),
        )
        for node in ray.nodes()
        if node["Alive"] and accepts_connections(node["NodeManagerAddress"], node["NodeManagerPort"])
    ]
    return sorted(nodes, key=lambda node: (address_key(node.address), node.node_id))


@dataclass(frozen=True)
class LostRanks:
    """Ranks on lost nodes."""

    by_node: dict[str, list[int]]
    """Ranks by the address of their node."""

    @property
    def address(self) -> str:
        return next(iter(self.by_node))

    @property
    def first(self) -> int:
        return self.by_node[self.address][0]

    def describe(self, role: str) -> str:
        """Text for an error message; the ranks of a node are consecutive."""
        ranges = {
            node: f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
            for node, ranks in self.by_node.items()
        }
        return "; ".join(f"node {node} is lost, with {ranks} of {role}" for node, ranks in ranges.items())


def lost_ranks(nodes_by_rank: Sequence[RayNode]) -> LostRanks | None:
    """The ranks of a group on lost nodes, or None.

    When a node is lost, ranks on other nodes often fail first, with errors that do not name the lost node.
    """
    alive = {node.node_id for node in alive_nodes()}
    lost: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes_by_rank):
        if node.node_id not in alive:
            lost.setdefault(node.address, []).append(rank)
    return LostRanks(lost) if lost else None


def describe_cluster() -> str:
    """The nodes of the cluster with their free GPUs, in one sentence."""
    parts = [f"{node.address} ({node.free_gpus:g} of {node.total_gpus:g} GPUs free)" for node in alive_nodes()]
    return f"The Ray cluster has {len(parts)} node(s): {', '.join(parts)}."


def _missing_resources(process_on_nodes: Sequence[int], use_gpu: bool, name: str, nodes: list[RayNode]) -> str:
    unit = "GPUs" if use_gpu else "processes"
    requested = f"{len(process_on_nodes)} node(s) with {list(process_on_nodes)} {unit}"
    by_total = sorted((node.total_gpus for node in nodes), reverse=True)
    fits_idle_cluster = len(process_on_nodes) <= len(nodes) and all(
        not use_gpu or have >= want
        for have, want in zip(by_total, sorted(process_on_nodes, reverse=True), strict=False)
    )
    if fits_idle_cluster:
        remedy = "Other jobs use GPUs: wait for them, or `ray stop` a stale cluster and `ray start --head` again."
    elif len(process_on_nodes) > len(nodes):
        remedy = "Join more nodes with `ray start --address=…`, or set trainer.nnodes."
    else:
        remedy = "Set trainer.n_gpus_per_node (or resource_pool_spec) to what the cluster has."
    return f"resource pool {name!r} needs {requested}. {describe_cluster()} {remedy}"


def address_key(address: str) -> tuple[Any, ...]:
    """Sort key: IPv4 addresses by number (10.0.0.9 before 10.0.0.10), then other addresses by text."""
    parts = address.split(".")
    return (0, *map(int, parts)) if len(parts) == 4 and all(part.isdigit() for part in parts) else (1, address)
