"""A group whose processes died is started anew in its place; what it had returned is still there."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from tests.support.workers import CollectiveWorker, Counter
from verl.protocol import DataProto
from verl.single_controller.base import WorkerCallError, WorkerDiedError
from verl.single_controller.base.worker_group import create_colocated_worker_cls
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup


@pytest.fixture(scope="module")
def group(cpu_pool):
    """Shared: the first test ends with restarted processes, which the next ones use."""
    roles = {"counter": RayClassWithInitArgs(Counter, 5), "summer": RayClassWithInitArgs(CollectiveWorker)}
    with RayWorkerGroup(cpu_pool, create_colocated_worker_cls(roles), expendable=True) as started:
        yield started


def test_processes_are_started_anew_under_the_same_groups_and_batches_outlive_them(group):
    views = group.spawn(["counter", "summer"])
    counter, summer = views["counter"], views["summer"]
    summer.setup()
    call, before = counter.add, [each[3] for each in counter.whoami()]
    totals = summer.add_total(DataProto.from_dict({"x": torch.arange(4)}))
    with pytest.raises(WorkerCallError, match="rank 1"):
        counter.fail(only_rank=1)

    os.kill(before[0], signal.SIGKILL)
    os.kill(before[1], signal.SIGSTOP)  # ends with the others
    with pytest.raises(WorkerDiedError, match="rank 0"):
        call(1)
    with pytest.raises(WorkerDiedError, match="rank 0"):
        summer.setup()
    group.restart()
    after = [each[3] for each in counter.whoami()]
    assert not set(after) & set(before)
    assert (counter.master_address, counter.master_port) == (group.master_address, group.master_port)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in before)
    assert totals.batch["total"].tolist() == [6] * 4
    assert call(1) == [6, 6], "what it was constructed with, and nothing that it learnt"
    summer.setup()
    assert summer.add_total(DataProto.from_dict({"x": torch.arange(2)})).batch["total"].tolist() == [1] * 2


@pytest.mark.slow
def test_only_dead_processes_are_restarted_if_requested(group):
    counter = group.spawn(["counter"])["counter"]
    call, before = counter.add, [rank[3] for rank in counter.whoami()]
    call(1)
    os.kill(before[1], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="rank 1"):
        call(1)
    assert group.restart(alone=True) == [1]
    assert counter.whoami()[0][3] == before[0]
    assert call(1)[1] == 6, "the value passed to the constructor, plus one"
    assert call(1)[0] > 7, "rank 0 keeps its state"

    group.shutdown()  # a killed process may still answer for a moment
    assert group.restart(alone=True) == [0, 1]
    assert call(1) == [6, 6]


def test_the_first_failure_of_an_expendable_group_ends_the_wait_too(group):
    summer = group.spawn(["summer"])["summer"]
    summer.setup()
    with pytest.raises(WorkerCallError, match="rank 1"):
        summer.collective_without(1, "raise").get()
