"""Starts the actors of ranks. Those of a pool may be started before the worker group that uses them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.single_controller.ray.actors import NAMESPACE, RayRankHost, on_lane
from verl.single_controller.ray.resource_pool import RayResourcePool, StartedRanks
from verl.utils.import_utils import register_user_modules_by_value

# Threads of the control lane. Every request that waits in an engine occupies one; abort and health need a free one.
_CONTROL_THREADS = 256


def new_prefix() -> str:
    """Return a prefix for the names of a group's actors."""
    return f"group-{uuid.uuid4().hex[:6]}"


def start_actors(
    pool: RayResourcePool,
    prefix: str,
    ranks: Sequence[int],
    *,
    detached: bool = False,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Start the processes of these ranks and return their actors, without waiting for them.

    `env`: environment variables, set before anything is imported.
    """
    # Also send the content of user files that were loaded before Ray was imported.
    register_user_modules_by_value()
    host = ray.remote(concurrency_groups={"compute": 1, "control": _CONTROL_THREADS, "heartbeat": 1})(RayRankHost)
    bundles = [
        (group, i) for group, count in zip(pool.get_placement_groups(), pool.store, strict=True) for i in range(count)
    ]
    return [
        host.options(
            name=f"{prefix}:{rank}",
            namespace=NAMESPACE,
            lifetime="detached" if detached else None,
            num_cpus=0,
            num_gpus=1.0 / pool.max_colocate_count if pool.use_gpu else 0,
            runtime_env={"env_vars": dict(env)} if env else None,
            scheduling_strategy=PlacementGroupSchedulingStrategy(*bundles[rank]),
        ).remote()
        for rank in ranks
    ]


def start_early(pools: Sequence[Any], modules: Sequence[str], compiles: bool = False) -> None:
    """Reserve these pools and start the processes of their ranks, which import `modules` in the background, and with
    `compiles` the compiler.

    The first worker group of a pool uses its processes; `release` of the pool ends those that no group has used. Raises
    ResourceError if the cluster is too small. Pools of other classes are ignored.
    """
    own = [pool for pool in pools if isinstance(pool, RayResourcePool) and not pool.detached and pool.started is None]
    for pool in own:
        pool.get_placement_groups()
    for pool in own:
        prefix = new_prefix()
        pool.started = StartedRanks(prefix, start_actors(pool, prefix, range(pool.world_size)))
        for actor in pool.started.actors:
            on_lane(actor, "preload", "compute").remote(list(modules), compiles)
