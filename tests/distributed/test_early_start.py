"""Rank processes that are started before their worker group."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import ray

from tests.support.workers import Counter
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.actors import on_lane, start_early


@pytest.fixture
def pool(ray_cluster: None) -> Iterator[RayResourcePool]:
    pool = RayResourcePool([1], use_gpu=False)
    yield pool
    pool.release()


def pids(group: RayWorkerGroup) -> list[int]:
    return [place[3] for place in group.execute_all_sync("whoami")]


def early_pids(pool: RayResourcePool) -> list[int]:
    assert pool.started is not None
    return [ray.get(on_lane(actor, "describe", "control").remote())[3] for actor in pool.started.actors]


def test_the_first_group_of_a_pool_uses_the_processes_and_a_later_one_starts_its_own(pool):
    start_early([pool], ["wave"])
    started = early_pids(pool)
    first = RayWorkerGroup(pool, RayClassWithInitArgs(Counter, 5))
    second = RayWorkerGroup(pool, RayClassWithInitArgs(Counter, 7))
    assert pids(first) == started
    assert not set(pids(second)) & set(started)
    assert (first.add(1), second.add(1)) == ([6], [8])


@pytest.mark.slow
def test_a_module_that_cannot_be_imported_does_not_prevent_the_start(pool):
    start_early([pool], ["no_such_module"])
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Counter, 5))
    assert group.add(1) == [6]


@pytest.mark.slow
def test_a_group_with_an_environment_starts_its_own_processes(pool):
    start_early([pool], [])
    started = early_pids(pool)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Counter, 5), worker_env={"VERL_TEST_WORKER_ENV": "given"})
    assert not set(pids(group)) & set(started)


@pytest.mark.slow
def test_releasing_the_pool_ends_processes_that_no_group_uses(pool):
    start_early([pool], [])
    started = early_pids(pool)
    pool.release()
    deadline = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in started) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in started)
