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

from verl.trainer.common.own_ray import OwnRay, RayLostError, watched
from verl.trainer.common.signals import Asked

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
    own = OwnRay([raylet.pid])
    assert (own.stopped(), own.lost()) == (None, None)
    raylet.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, raylet.pid, os.WSTOPPED | os.WNOWAIT)
    assert own.stopped() == f"Ray's raylet (pid {raylet.pid}) is stopped (SIGSTOP)"
    own.kill()
    raylet.wait()
    assert (own.stopped(), own.lost()) == (None, f"raylet, pid {raylet.pid}")


def test_a_gcs_elsewhere_is_lost_when_it_does_not_answer_again_and_again():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        joined = OwnRay(gcs=address)
        assert [joined.lost() for _ in range(4)] == [None] * 4
    assert [joined.lost() for _ in range(2)] == [None] * 2, "that may be an accident"
    assert joined.lost() == f"nothing answers at {address}, the address of its GCS"


@needs_proc
def test_what_runs_beside_returns_and_raises_as_itself_and_is_not_waited_for_without_ray(raylet):
    own, never = OwnRay([raylet.pid]), threading.Event()
    assert watched(lambda: 7, own, Asked()) == 7
    with pytest.raises(LookupError, match="mine"):
        watched(lambda: {}["mine"], own, Asked())
    raylet.kill()
    raylet.wait()
    with pytest.raises(RayLostError, match="raylet"):
        watched(never.wait, own, Asked())
    never.set()
