"""A Ray that is lost is told of within seconds: one of ours by its processes, another's by its GCS."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl.trainer.recovery.ray_monitor import RayLostError, RayProcesses, run_monitored
from verl.trainer.recovery.signals import StopRequest

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def raylet(tmp_path) -> Iterator[subprocess.Popen]:
    """A process of that name."""
    program = tmp_path / "raylet"
    shutil.copy(shutil.which("sleep") or "", program)
    process = subprocess.Popen([str(program), "60"])
    while Path(f"/proc/{process.pid}/comm").read_text().strip() != "raylet":
        time.sleep(0.01)
    yield process
    process.kill()
    process.wait()


@needs_proc
def test_one_that_is_stopped_is_named_and_one_that_ended_is_lost(raylet):
    processes = RayProcesses([raylet.pid])
    assert (processes.describe_stopped(), processes.describe_lost()) == (None, None)
    raylet.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, raylet.pid, os.WSTOPPED | os.WNOWAIT)
    assert processes.describe_stopped() == f"Ray's raylet (pid {raylet.pid}) is stopped (SIGSTOP)"
    processes.kill()
    raylet.wait()
    assert (processes.describe_stopped(), processes.describe_lost()) == (None, f"raylet, pid {raylet.pid}")


def test_a_gcs_elsewhere_is_lost_when_it_does_not_answer_again_and_again():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        joined = RayProcesses(gcs=address)
        assert [joined.describe_lost() for _ in range(4)] == [None] * 4
    assert [joined.describe_lost() for _ in range(2)] == [None] * 2, "that may be an accident"
    assert joined.describe_lost() == f"nothing answers at {address}, the address of its GCS"


@needs_proc
def test_what_runs_beside_returns_and_raises_as_itself_and_is_not_waited_for_without_ray(raylet):
    processes, never = RayProcesses([raylet.pid]), threading.Event()
    assert run_monitored(lambda: 7, processes, StopRequest()) == 7
    with pytest.raises(LookupError, match="mine"):
        run_monitored(lambda: {}["mine"], processes, StopRequest())
    raylet.kill()
    raylet.wait()
    with pytest.raises(RayLostError, match="raylet"):
        run_monitored(never.wait, processes, StopRequest())
    never.set()
