"""Signals to more than the program: it ends soon, says what was lost, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.training_harness import make_task, overrides

# The real driver on a real Ray; the run itself only waits.
PROGRAM = """
import pathlib, sys, time
from verl.config import load_config
from verl.trainer.common.ending import ends_in_words
from verl.trainer.main_ppo import TaskRunner, run_ppo

class Waits(TaskRunner):
    def run(self, config):
        pathlib.Path("running").touch()
        time.sleep(300)

with ends_in_words():
    run_ppo(load_config(None, sys.argv[1:]), Waits, supervised=True)
"""


@pytest.fixture
def running(tmp_path) -> Iterator[subprocess.Popen]:
    task = make_task(tmp_path)
    arguments = overrides(task, tmp_path, "algorithm.adv_estimator=grpo")
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not Path(tmp_path, "running").exists():
        assert process.poll() is None, process.stderr.read()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    yield process
    process.kill()
    process.stderr.close()


def gone_soon(family: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that are still there after so long."""
    return psutil.wait_procs(family, timeout=seconds)[1]


@pytest.mark.slow
def test_when_ray_gets_the_signal_too_the_driver_does_not_wait_for_it(running):
    family = psutil.Process(running.pid).children(recursive=True)
    start = time.monotonic()
    for member in [running, *family]:
        member.send_signal(signal.SIGTERM)
    _, errors = running.communicate()
    assert time.monotonic() - start < 100
    assert running.returncode == 1
    *_, cause, last = errors.rstrip().splitlines()
    assert "after SIGTERM to all processes of the run" in cause
    assert last.endswith("The same command starts from the beginning: no step was saved.")
    assert gone_soon(family, 60) == []


@pytest.mark.slow
def test_the_second_signal_ends_it_at_once_and_all_it_started(running):
    family = psutil.Process(running.pid).children(recursive=True)
    os.killpg(running.pid, signal.SIGTERM)
    time.sleep(1)
    assert running.poll() is None, "it finishes its step first"
    os.killpg(running.pid, signal.SIGTERM)
    assert running.wait() == -signal.SIGTERM
    assert gone_soon(family, 60) == []
