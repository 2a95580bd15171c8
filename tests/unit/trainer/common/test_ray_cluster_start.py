"""Starting Ray: limits that follow the load, a second attempt, and what is said when both fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl.trainer.common import ray_cluster
from verl.trainer.common.ray_cluster import set_start_limits, start_limit, start_local_cluster, start_ray
from verl.trainer.recovery.hang_detector import HangLimits
from verl.trainer.recovery.ray_monitor import RayUnavailableError
from verl.trainer.recovery.signals import StopSignal
from verl.trainer.recovery.supervised_process import before_first_step
from verl.utils import resources
from verl.utils.process_tree import why_not_running

TIMED_OUT = "The current node timed out during startup. This could happen because\nmore"


@pytest.fixture
def set_load(monkeypatch) -> Callable[[float], None]:
    """Pretend a load average on two cores; the environment is as before afterwards."""
    for name in (*ray_cluster.LIMITS, ray_cluster.NO_CPP_STACKS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(ray_cluster, "set_here", set())
    monkeypatch.setattr(resources, "usable_cores", lambda: 2.0)

    def set_to(load: float) -> None:
        monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))

    return set_to


@pytest.fixture(autouse=True)
def no_shutdown(monkeypatch) -> None:
    """The Ray of this process is that of other tests."""
    monkeypatch.setattr("ray.shutdown", lambda: None)


def limits_now() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in ray_cluster.LIMITS}


@pytest.mark.parametrize(("load", "seconds"), [(0.0, 120), (2.0, 120), (7.0, 420), (31.0, 1200), (1000.0, 1200)])
def test_the_limit_follows_the_load_per_core(set_load, load, seconds):
    set_load(load)
    assert start_limit() == seconds
    assert start_limit(45.0) == 45.0, "a configured one stays"


def test_rays_limits_are_set_unless_the_user_did(set_load, monkeypatch):
    set_load(6.0)
    monkeypatch.setenv("RAY_worker_register_timeout_seconds", "77")
    set_start_limits(start_limit())
    assert limits_now() == {
        "RAY_gcs_server_port_wait_time_s": "360",
        "RAY_py_gcs_connect_timeout_s": "360",
        "RAY_worker_register_timeout_seconds": "77",
        "RAY_agent_register_timeout_ms": "360000",
    }
    set_start_limits(720.0)
    assert sorted(limits_now().values()) == ["720", "720", "720000", "77"], "a later attempt may be given more"


def test_the_limit_for_starting_ranks_follows_the_load_too():
    assert HangLimits(60.0, load=4.0).limit("", "starting") == 1200
    assert HangLimits(60.0, load=1.0).limit("", "starting") == 300
    assert HangLimits(60.0, load=4.0).limit("gen", "behind") == 60


def ends_soon(pid: int) -> bool:
    """It was killed: the kernel may still be busy with it."""
    deadline = time.monotonic() + 60
    while why_not_running(pid) not in ("ended", "gone") and time.monotonic() < deadline:
        time.sleep(0.01)
    return why_not_running(pid) in ("ended", "gone")


def failing(times: int, started: list[int]) -> Callable[[], str]:
    """Starts a process, then fails as Ray does, the first few times."""

    def init() -> str:
        started.append(subprocess.Popen(["sleep", "600"]).pid)
        if len(started) <= times:
            raise Exception(TIMED_OUT)
        return "started"

    return init


def test_a_first_failure_is_retried_and_leaves_no_process(set_load, caplog):
    set_load(9.0)
    started: list[int] = []
    result, pids = start_local_cluster(failing(1, started))
    try:
        assert result == "started"
        assert pids == started[1:]
        assert ends_soon(started[0])
        assert "Ray did not start (The current node timed out during startup" in caplog.text
        assert "load average 9.0 on 2 cores" in caplog.text
    finally:
        os.kill(started[1], signal.SIGKILL)


@pytest.mark.parametrize("load", [0.5, 9.0])
def test_the_second_failure_ends_with_what_to_do(set_load, load):
    set_load(load)
    started: list[int] = []
    with pytest.raises(RayUnavailableError) as caught:
        start_local_cluster(failing(2, started))
    assert [ends_soon(pid) for pid in started] == [True, True]
    assert "two attempts of up to" in caught.value.reason
    said = str(caught.value)
    assert f"ray_init.start_timeout={1080 if load > 1 else 240}" in said
    assert "session_latest/logs" in said
    assert ("stop other processes" in said) == (load > 1)


def test_a_run_ends_with_the_same_words(set_load, monkeypatch):
    set_load(9.0)

    def init(**options: Any) -> None:
        raise Exception(TIMED_OUT)

    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr("ray.init", init)
    with pytest.raises(RayUnavailableError, match=r"ray_init\.start_timeout=1080"):
        start_ray()


def test_sigterm_while_ray_starts_is_a_stop_and_no_failure(set_load):
    """Ray's own handler exits with the number of the signal."""
    set_load(0.0)
    pids: list[int] = []

    def init() -> None:
        pids.append(subprocess.Popen(["sleep", "600"]).pid)
        sys.exit(signal.SIGTERM)

    with pytest.raises(StopSignal) as caught, before_first_step():
        start_local_cluster(init)
    assert (caught.value.name, caught.value.exit_code) == ("SIGTERM", 143)
    assert ends_soon(pids[0])


LOST_GCS = """
import os, signal
import ray
from ray._private import services
from verl.trainer.common.ray_cluster import start_ray
from verl.utils.process_tree import children, command_line

lookup, killed = services.get_node, []

def get_node(*args):
    if not killed:
        killed.extend(pid for pid in children(os.getpid()) if b"gcs_server" in command_line(pid))
        os.kill(killed[0], signal.SIGKILL)
    return lookup(*args)

services.get_node = get_node
start_ray(num_cpus=1)
print("started", flush=True)
ray.shutdown()
"""


@pytest.mark.slow
@pytest.mark.processes
def test_ray_is_started_again_when_its_gcs_dies_during_the_start(tmp_path):
    """Ray would look up its node for seconds, in a call of C++ that handles no signals."""
    done = subprocess.run(
        [sys.executable, "-c", LOST_GCS],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "RAY_ADDRESS": "local", "PYTHONPATH": str(Path(__file__).parents[4])},
    )
    assert done.stdout == "started\n", done.stderr[-3000:]
    assert "Ray's own processes ended while Ray was starting (gcs_server, pid " in done.stderr
    assert "Starting it again" in done.stderr


SLOW_RAYLET = """
import sys
from pathlib import Path
import ray
from ray._private import services
from verl.trainer.common.ray_cluster import start_ray

slow = Path(sys.argv[1])
slow.write_text(f"#!/bin/sh\\nsleep 35\\nexec {services.RAYLET_EXECUTABLE} \\"$@\\"\\n")
slow.chmod(0o755)
services.RAYLET_EXECUTABLE = str(slow)
start_ray(num_cpus=1)
assert ray.get(ray.remote(lambda: 7).remote()) == 7
print("started", flush=True)
ray.shutdown()
"""


@pytest.mark.processes
@pytest.mark.slow
def test_a_raylet_that_needs_longer_than_ray_waits_is_waited_for(tmp_path):
    """Ray itself gives up after 30 s, whatever is configured."""
    done = subprocess.run(
        [sys.executable, "-c", SLOW_RAYLET, str(tmp_path / "raylet")],
        capture_output=True,
        text=True,
        env={**os.environ, "RAY_ADDRESS": "local", "PYTHONPATH": str(Path(__file__).parents[4])},
    )
    assert "started" in done.stdout, done.stderr[-3000:]
    assert "Starting it again" not in done.stderr, "in the first attempt"
