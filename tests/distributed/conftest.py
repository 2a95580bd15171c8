"""Worker groups that several tests share, because starting processes is slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.workers import Counter, MeshWorker, RolloutWorker
from verl.single_controller.base import ClassWithInitArgs, WorkerGroup
from verl.single_controller.base.worker_group import create_colocated_worker_cls
from verl.single_controller.local import LocalWorkerGroup
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup


@pytest.fixture(scope="session")
def cpu_pool(ray_cluster: None) -> Iterator[RayResourcePool]:
    """Two ranks without GPUs."""
    pool = RayResourcePool([2], use_gpu=False)
    yield pool
    pool.release()


@pytest.fixture
def start(cpu_pool: RayResourcePool) -> Iterator[Callable[..., RayWorkerGroup]]:
    """Start a group of two ranks; it is shut down after the test."""
    started: list[RayWorkerGroup] = []

    def start_group(cls: type, *args: object, **kwargs: object) -> RayWorkerGroup:
        started.append(RayWorkerGroup(cpu_pool, RayClassWithInitArgs(cls, *args, **kwargs)))
        return started[-1]

    yield start_group
    for group in started:
        group.shutdown()


@pytest.fixture(scope="session")
def ray_roles(cpu_pool: RayResourcePool) -> Iterator[dict[str, RayWorkerGroup]]:
    """Several roles in the same two processes on Ray, for tests that do not end them."""
    roles = {
        "Counter": RayClassWithInitArgs(Counter, 5),
        "RolloutWorker": RayClassWithInitArgs(RolloutWorker, prompt=8, response=16, pad=99),
        "MeshWorker": RayClassWithInitArgs(MeshWorker, dp=1, tp=2),
    }
    env = {"VERL_TEST_WORKER_ENV": "given"}
    with RayWorkerGroup(cpu_pool, create_colocated_worker_cls(roles), worker_env=env) as group:
        yield group.spawn(list(roles))


@pytest.fixture(scope="session")
def ray_counters(ray_roles: dict[str, RayWorkerGroup]) -> RayWorkerGroup:
    """Two `Counter` ranks on Ray, for tests that do not change their state."""
    return ray_roles["Counter"]


@pytest.fixture(params=["local", "ray"])
def counters(request: pytest.FixtureRequest) -> WorkerGroup:
    """`Counter`s in this process (one rank) and on Ray (two)."""
    if request.param == "local":
        return LocalWorkerGroup(ray_cls_with_init=ClassWithInitArgs(Counter, 5))
    return request.getfixturevalue("ray_counters")
