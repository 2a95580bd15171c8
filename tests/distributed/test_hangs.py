"""A rank that stands still is named within seconds, and the call that waits for it ends; nothing waits with it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import ray
import torch
import torch.distributed as dist

from tests.support.workers import CollectiveWorker, Counter
from verl.single_controller.base import HangError, WorkerDiedError
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.trainer.common.run_status import Phases, RunStatus, StatusSnapshot
from verl.trainer.recovery.hang_detector import HangDetector
from verl.trainer.recovery.ray_monitor import ControllerMonitor, RayProcesses
from verl.utils.process_tree import command_line, why_not_running, with_descendants
from verl.utils.progress import expect, tick
from verl.utils.stacks import enable_stack_dumps


class Stuck(CollectiveWorker):
    """Ranks that wait for each other in several wrong ways."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pids(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def work_together(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        expect(1)
        while time.monotonic() < end:
            time.sleep(0.05)
            dist.all_reduce(torch.ones(1))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count(self, seconds: float, more_per_rank: float) -> None:
        end = time.monotonic() + seconds + self.rank * more_per_rank
        while time.monotonic() < end:
            time.sleep(0.2)
            tick()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def deadlock(self, rank: int) -> None:
        if self.rank == rank:
            threading.Lock().acquire() and threading.Event().wait()
        dist.all_reduce(torch.ones(1))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def mismatch(self) -> None:
        if self.rank == 0:
            dist.broadcast(torch.ones(1), src=1)
        else:
            dist.all_reduce(torch.ones(1))


@pytest.fixture
def group(start):
    ranks = start(Stuck)
    ranks.setup()
    return ranks


def later(seconds: float, act) -> None:
    threading.Timer(seconds, act).start()


def hang_of(act, timeout: float, phase: str = "update_actor") -> tuple[HangError, float, RunStatus]:
    status = RunStatus(10, done_steps=6)
    began = time.monotonic()
    with pytest.raises(HangError) as caught, HangDetector(status, timeout), Phases(status)(phase):
        act()
    return caught.value, time.monotonic() - began, status


@pytest.mark.slow
def test_a_stopped_rank_is_named_in_seconds_the_call_ends_and_no_status_call_waits(group, caplog):
    pid = group.pids()[1]
    later(1.0, lambda: os.kill(pid, signal.SIGSTOP))
    status = RunStatus(10, done_steps=6)
    asked, over = [], threading.Event()

    def keep_asking() -> None:
        while not over.wait(0.2):
            began = time.monotonic()
            asked.append((status.snapshot().problem, time.monotonic() - began))

    asking = threading.Thread(target=keep_asking)
    asking.start()
    began = time.monotonic()
    try:
        with pytest.raises(HangError) as caught, HangDetector(status, 8.0), Phases(status)("update_actor", group):
            group.work_together(120)
    finally:
        over.set()
        asking.join()
    took, error = time.monotonic() - began, caught.value
    assert took < 40
    assert max(seconds for _, seconds in asked) < 10, "asking where it stands never waits for the rank"
    assert any(trouble and f"pid {pid}) is stopped (SIGSTOP)" in trouble for trouble, _ in asked), "said beforehand"
    assert error.summary.startswith("update_actor of step 7 has hung for ")
    assert f"rank 1 of Stuck (host {os.uname().nodename}, pid {pid}) is stopped (SIGSTOP)" in error.summary
    assert "rank 0 of Stuck waits for it in all_reduce" in error.summary
    assert (error.role, error.rank, error.method, error.phase, error.step) == (
        "Stuck",
        1,
        "work_together",
        "update_actor",
        7,
    )
    assert "Stuck[0], stack:\n    all_reduce (" in str(error)
    assert "update_actor of step 7 has waited for " in caplog.text
    deadline = time.monotonic() + 120
    while why_not_running(pid) == "stopped":
        assert time.monotonic() < deadline, "it does not outlive the run"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_process_that_is_stopped_before_it_is_a_rank_is_named(cpu_pool):
    before, over, stopped = set(with_descendants(os.getpid())), threading.Event(), []

    def stop_the_first() -> None:
        while not stopped and not over.wait(0.01):
            new = [
                pid
                for pid in with_descendants(os.getpid())
                if pid not in before and b"default_worker" in command_line(pid)
            ]
            for pid in new[:1]:
                os.kill(pid, signal.SIGSTOP)
                stopped.append(pid)

    threading.Thread(target=stop_the_first).start()
    # Variables of its own: no process that Ray has at hand will do.
    start = lambda: RayWorkerGroup(cpu_pool, RayClassWithInitArgs(Stuck), worker_env={"VERL_TEST_STOPPED": "1"})  # noqa: E731
    try:
        error, took, _ = hang_of(start, timeout=4.0, phase="")
    finally:
        over.set()
        for pid in stopped:
            os.kill(pid, signal.SIGKILL)
    assert "the processes of Stuck have not started: one that Ray has started (host " in error.summary
    assert f"pid {stopped[0]}) is stopped (SIGSTOP)" in error.summary
    assert took < 60, "what is stopped is not given the time that starting may take"


@pytest.mark.slow
def test_a_deadlocked_function_is_named_with_its_place(group):
    error, _, _ = hang_of(lambda: group.deadlock(1), timeout=4.0)
    assert "rank 1 of Stuck" in error.summary
    assert f"is in the user's function deadlock ({__file__}:" in error.summary
    assert "rank 0 of Stuck waits for it in all_reduce" in error.summary


@pytest.mark.slow
def test_ranks_in_different_collectives_are_named_with_them(group):
    error, _, _ = hang_of(group.mismatch, timeout=4.0)
    assert "ranks wait in different collectives: rank 0 of Stuck in broadcast" in error.summary
    assert "rank 1 of Stuck in all_reduce" in error.summary


@pytest.mark.slow
def test_a_call_that_goes_on_counting_is_no_hang_and_the_rank_that_others_wait_for_is_seen(group):
    status = RunStatus(10)
    with HangDetector(status, 4.0) as watch, Phases(status)("gen"):
        group.count(6.0, 4.0)  # rank 1 needs longer
    assert status.problem is None
    assert 1.0 < watch.step_done(10.0)["timing_s/waiting_for_one_rank"] < 10.0
    assert watch.step_done(1.0)["timing_s/waiting_for_one_rank"] == 0.0


@pytest.mark.slow
def test_a_rank_of_a_group_that_training_does_not_need_is_killed_so_that_the_group_can_start_anew(start):
    group = start(Counter)
    group.expendable = True
    pid = group.whoami()[1][3]
    os.kill(pid, signal.SIGSTOP)
    status = RunStatus(10)
    with pytest.raises(WorkerDiedError, match="rank 1"), HangDetector(status, 5.0), Phases(status)("gen"):
        group.add(1)
    assert status.hang is None


class Controller:
    """Answers where it stands until it cannot."""

    def run_status(self) -> StatusSnapshot:
        return StatusSnapshot(1, 9, "rollout", pid=os.getpid(), host=os.uname().nodename)

    def hold_the_gil(self) -> None:
        enable_stack_dumps()
        while True:
            ctypes.PyDLL(None).sleep(600)


def keep_looking(poll: ControllerMonitor) -> None:
    for _ in range(100):
        began = time.monotonic()
        poll.poll()
        assert time.monotonic() - began < 60, "looking never waits for it"
        time.sleep(0.3)


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("stop", r"TaskRunner, pid {pid}\) .*SIGSTOP"),
        pytest.param(
            "hold",
            r"TaskRunner, pid {pid}\) .*\bhold_the_gil\b",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.slow
def test_the_driver_judges_a_controller_that_does_not_answer(ray_cluster, how, sentence, caplog):
    controller = ray.remote(num_cpus=0, max_concurrency=2)(Controller).remote()
    poll = ControllerMonitor(controller, RayProcesses(), 6.0)
    while poll.status is None:
        poll.poll()
        time.sleep(0.1)
    pid = poll.status.pid
    try:
        if how == "stop":
            os.kill(pid, signal.SIGSTOP)
        else:
            controller.hold_the_gil.remote()
        with pytest.raises(HangError, match=sentence.format(pid=pid)) as caught:
            keep_looking(poll)
        assert (caught.value.phase, caught.value.step) == ("rollout", 2)
        assert "the run has waited for" in caplog.text
        assert why_not_running(pid) != "stopped", "it does not outlive the run"
    finally:
        ray.kill(controller)


ON_ANOTHER_NODE = """
import os, signal, time
import ray
from ray.cluster_utils import Cluster
from verl.single_controller.ray.rank_monitor import NodeInspector, RankProcess
from verl.utils.stacks import enable_stack_dumps

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
cluster.add_node(num_cpus=1, resources={"there": 1})
ray.init(address=cluster.address, log_to_driver=False)


class Rank:
    def where(self):
        enable_stack_dumps()
        return ray.get_runtime_context().get_node_id(), "there", os.getpid()


rank = ray.remote(resources={"there": 1})(Rank).remote()
process = RankProcess(*ray.get(rank.where.remote()))
assert process.node != ray.get_runtime_context().get_node_id()
nodes = NodeInspector()
state, stacks = nodes.inspect(process)
assert state is None and stacks
os.kill(process.pid, signal.SIGSTOP)
assert nodes.inspect(process) == ("stopped", {})
nodes.kill(process)
time.sleep(1)
assert nodes.inspect(process)[0] in ("gone", "ended")
assert nodes.inspect(RankProcess("0" * 56, "nowhere", 1)) is None
ray.shutdown()
cluster.shutdown()
print("as it should be")
"""


@pytest.mark.slow
def test_processes_of_other_nodes_are_looked_at_and_killed_there():
    run = subprocess.run([sys.executable, "-c", ON_ANOTHER_NODE], capture_output=True, text=True, timeout=300)
    assert run.stdout.endswith("as it should be\n"), run.stderr[-3000:]
