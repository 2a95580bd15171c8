"""A worker that raises or dies ends in a named error on the controller, soon, and never in a hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import ray
import torch

from tests.support.workers import CollectiveWorker, Counter
from verl.protocol import DataProto
from verl.single_controller.base import ClassWithInitArgs, WorkerCallError, WorkerDiedError
from verl.single_controller.local import LocalWorkerGroup
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, ResourceError


def test_a_raising_method_names_role_rank_host_method_and_traceback(counters):
    with pytest.raises(WorkerCallError) as caught:
        counters.fail()
    error = caught.value
    assert (error.role, error.rank, error.method) == ("Counter", 0, "fail")
    assert str(os.uname().nodename) in error.host
    assert "role 'Counter', rank 0" in str(error)
    assert "method 'fail'" in str(error)
    assert "no such key on rank 0" in str(error)
    assert "workers.py" in error.worker_traceback
    assert isinstance(error.__cause__, KeyError)
    assert counters.add(0), "the group goes on"


def test_the_rank_that_failed_is_named(ray_counters):
    with pytest.raises(WorkerCallError, match=r"role 'Counter', rank 1") as caught:
        ray_counters.fail(only_rank=1)
    assert caught.value.rank == 1


class Broken(Counter):
    def __init__(self) -> None:
        raise FileNotFoundError("model.safetensors is missing")


def test_a_failing_constructor_is_named():
    with pytest.raises(WorkerCallError, match=r"FileNotFoundError: model.safetensors is missing.*method '__init__'"):
        LocalWorkerGroup(ray_cls_with_init=ClassWithInitArgs(Broken))


@pytest.mark.slow
def test_a_failing_constructor_leaves_no_process(cpu_pool):
    with pytest.raises(WorkerCallError, match=r"FileNotFoundError: model.safetensors is missing.*method '__init__'"):
        RayWorkerGroup(cpu_pool, RayClassWithInitArgs(Broken), name_prefix="test-broken")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            RayWorkerGroup.from_detached(name_prefix="test-broken")
        except ValueError:
            return
        except Exception:  # still dying
            pass
        time.sleep(0.1)
    pytest.fail("the broken group's actors are still registered")


@pytest.mark.slow
def test_an_error_of_a_group_arrives_whole_from_the_process_of_its_controller(ray_cluster):
    """The trainer is an actor; who started it gets its errors over Ray."""

    @ray.remote(num_cpus=0)
    def control():
        LocalWorkerGroup(ray_cls_with_init=ClassWithInitArgs(Counter)).fail()

    with pytest.raises(WorkerCallError, match="no such key on rank 0") as caught:
        ray.get(control.remote())
    error = caught.value.cause
    assert (error.role, error.rank, error.method) == ("Counter", 0, "fail")
    assert isinstance(error.__cause__, KeyError)


def test_an_exception_that_does_not_pickle_still_arrives(counters):
    class Unpicklable(Exception):
        def __init__(self) -> None:
            super().__init__("cannot travel")
            self.lock = threading.Lock()

    def explode():
        raise Unpicklable

    with pytest.raises(WorkerCallError, match="cannot travel"):
        counters.execute_all_sync("run_this", explode)


def test_killed_during_a_call_the_controller_has_a_named_error_soon(start):
    group = start(Counter)
    victim = group.whoami()[1][3]
    future = group.long_compute(600.0)
    time.sleep(0.3)
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(WorkerDiedError) as caught:
        future.get()
    assert (caught.value.role, caught.value.rank, caught.value.method) == ("Counter", 1, "long_compute")
    assert f"pid {victim}" in caught.value.host
    assert "killed by signal 9 from another process, or crashed; not out of memory (" in caught.value.summary
    assert "the kernel's OOM killer did not run" in caught.value.summary
    with pytest.raises(WorkerDiedError, match="rank 1"):
        group.add(1)  # at once, not after a time-out


@pytest.mark.parametrize(
    ("how", "expected"), [("die", WorkerDiedError), pytest.param("raise", WorkerCallError, marks=pytest.mark.slow)]
)
def test_ranks_left_waiting_in_a_collective_do_not_hang_the_controller(start, how, expected):
    group = start(CollectiveWorker)
    group.setup()
    assert group.add_total(DataProto.from_dict({"x": torch.arange(4)})).batch["total"].tolist() == [6] * 4
    with pytest.raises(expected, match="rank 1"):
        group.collective_without(1, how).get()


def test_asking_for_more_than_there_is_is_one_error_at_once(ray_cluster):
    with pytest.raises(
        ResourceError,
        match=r"'pool' .*\b1 node\(s\) .*\[8\] GPU.*\b1 node\(s\).*\b0 of 0 GPUs.*trainer\.n_gpus_per_node",
    ):
        RayResourcePool([8], use_gpu=True).get_placement_groups()
    with pytest.raises(
        ResourceError, match=r"'pool' .*\b2 node\(s\) .*\[1, 1\].*`ray start --address.*trainer\.nnodes"
    ):
        RayResourcePool([1, 1], use_gpu=False).get_placement_groups()


RUNS_FULL = """
import sys, time
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.worker_group import WorkerDiedError
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
import ray

class Sleeper(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_actor(self):
        time.sleep(60)

ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False, object_store_memory=2**27)
pool = RayResourcePool([1], use_gpu=False)
try:
    RayWorkerGroup(pool, RayClassWithInitArgs(Sleeper)).update_actor()
except WorkerDiedError as error:
    print(error.summary)
"""


@pytest.mark.slow
def test_a_rank_that_rays_memory_monitor_kills_died_out_of_host_memory():
    """The monitor itself, with a limit that is always passed."""
    limits = {"RAY_memory_usage_threshold": "0.01", "RAY_memory_monitor_refresh_ms": "100"}
    done = subprocess.run(
        [sys.executable, "-c", RUNS_FULL], env={**os.environ, **limits}, capture_output=True, text=True
    )
    assert "Ray's memory monitor killed it, out of host memory" in done.stdout, done.stderr[-3000:]
    assert "GB used / " in done.stdout
