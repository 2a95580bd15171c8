"""Stop signals to the processes of a run: it ends in time, prints what is lost, and leaves no process behind."""

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
import atexit, pathlib, sys, time
from dataclasses import replace
from verl.config import load_config
from verl.trainer.recovery.exit_messages import exit_with_message
from verl.trainer.main_ppo import TaskRunner, run_ppo

class WaitingRunner(TaskRunner):
    status_calls = 0
    stopped = False

    def run_status(self):
        self.status_calls += 1
        if self.status_calls > 1:  # the driver has received the first status
            pathlib.Path("running").touch()
        return replace(super().run_status(), starting=False)  # the first step has begun

    def request_stop(self):
        self.stopped = pathlib.Path("saves").exists()

    def run(self, config):
        while not self.stopped:
            time.sleep(0.1)

def clean_up():
    pathlib.Path("leaving").touch()
    time.sleep(5)

atexit.register(clean_up)
with exit_with_message():
    run_ppo(load_config(None, sys.argv[1:]), WaitingRunner, supervised=True)
"""


# The main thread blocks in C as soon as Ray has started: Python's signal handlers do not run.
BLOCKED_START = """
import ctypes, pathlib
from verl.trainer import main_ppo

start, mutex, lock = main_ppo.start_or_join_ray, ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock

def start_and_block(*arguments, **options):
    start(*arguments, **options)
    pathlib.Path("running").touch()
    lock(mutex), lock(mutex)

main_ppo.start_or_join_ray = start_and_block
main_ppo.main()
"""
STOPPED_BEFORE_FIRST_STEP = (
    "stopped by SIGTERM before the first step. The same command starts from the beginning: no step was saved.\n"
)


def start_run(folder: Path, program: list[str], *keys: str) -> subprocess.Popen:
    arguments = overrides(make_task(folder), folder, "algorithm.adv_estimator=grpo", *keys)
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell's background job ignores SIGINT, and its children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def wait_until_running(process: subprocess.Popen, folder: Path) -> None:
    deadline = time.monotonic() + 120
    while not (folder / "running").exists():
        assert process.poll() is None, process.stderr.read()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def running(tmp_path, request) -> Iterator[subprocess.Popen]:
    """A test may be parametrised (indirectly) with more keys."""
    process = start_run(tmp_path, ["-c", PROGRAM], *getattr(request, "param", ()))
    wait_until_running(process, tmp_path)
    yield process
    process.kill()
    process.stderr.close()


def remaining_after(family: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Return the processes that have not ended within `seconds`."""
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
    assert remaining_after(family, 60) == []


@pytest.mark.slow
def test_the_second_signal_ends_it_at_once_and_all_it_started(running):
    family = psutil.Process(running.pid).children(recursive=True)
    os.killpg(running.pid, signal.SIGTERM)
    time.sleep(1)
    assert running.poll() is None, "it finishes its step first"
    os.killpg(running.pid, signal.SIGTERM)
    assert running.wait() == -signal.SIGTERM
    assert remaining_after(family, 60) == []


@pytest.mark.slow
@pytest.mark.parametrize("running", [(), ("trainer.max_restarts=0",)], ids=["supervised", "alone"], indirect=True)
def test_ctrl_c_again_after_the_run_has_ended_leaves_no_traceback(running, tmp_path):
    """The first one ends the run, which is saved; the second comes while the interpreter shuts down."""
    (tmp_path / "saves").touch()
    os.killpg(running.pid, signal.SIGINT)
    deadline = time.monotonic() + 120
    while not (tmp_path / "leaving").exists() and running.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    errors = running.communicate()[1]
    assert "Traceback" not in errors, errors[-3000:]
    assert "Exception ignored" not in errors
    assert running.returncode in (0, 130)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 1.5, 4.0, 9.0])
def test_sigterm_before_the_first_step_ends_the_command_with_one_sentence(tmp_path, seconds):
    """At moments of the start of Ray, of the controller and of the ranks."""
    process = start_run(tmp_path, ["-m", "verl.trainer.main_ppo"])
    errors = []
    for line in process.stderr:
        errors.append(line)
        if "Initializing Ray" in line:
            break
    time.sleep(seconds)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    errors += process.stderr.readlines()
    assert process.wait() == 143, "".join(errors[-40:])
    text = "".join(errors)
    assert "Traceback" not in text, text[-3000:]
    assert "received at time" not in text, "no C++ stacks of Ray"
    assert "finished" not in text, "there is no step to finish"
    assert errors[-1] == STOPPED_BEFORE_FIRST_STEP
    assert remaining_after(family, 60) == []


@pytest.mark.slow
def test_sigterm_ends_a_driver_that_blocks_before_the_first_step(tmp_path):
    process = start_run(tmp_path, ["-c", BLOCKED_START])
    wait_until_running(process, tmp_path)
    family = psutil.Process(process.pid).children(recursive=True)
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    errors = process.stderr.readlines()
    assert process.wait() == 143, "".join(errors[-40:])
    assert time.monotonic() - start < 60
    assert errors[-1] == STOPPED_BEFORE_FIRST_STEP
    assert len(family) > 2, "Ray was started"
    assert remaining_after(family, 60) == []
