"""The processes without which there is no Ray: whether they are there, and whether they can run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl.trainer.common.own_ray import OwnRay


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_that_is_stopped_is_named_and_one_that_ended_is_lost(tmp_path):
    program = tmp_path / "raylet"
    shutil.copy(shutil.which("sleep"), program)
    process = subprocess.Popen([str(program), "60"])
    while Path(f"/proc/{process.pid}/comm").read_text().strip() != "raylet":
        time.sleep(0.01)
    own = OwnRay([process.pid])
    try:
        assert (own.stopped(), own.lost()) == (None, None)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert own.stopped() == f"Ray's raylet (pid {process.pid}) is stopped (SIGSTOP)"
    finally:
        own.kill()
        process.wait()
    assert (own.stopped(), own.lost()) == (None, f"raylet, pid {process.pid}")
