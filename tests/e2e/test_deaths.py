"""A process that a run needs dies: the error names it within seconds, no process remains, the next run resumes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.training_harness import make_task, overrides

pytestmark = pytest.mark.processes

# The real supervisor and driver on a real Ray; the run itself only waits, and is done when it has been started often
# enough.
PROGRAM = """
import pathlib, sys, time
from verl.config import load_config
from verl.trainer.recovery.exit_messages import exit_with_message
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.recovery import supervisor

class Waits(TaskRunner):
    def run(self, config):
        attempts = len(list(pathlib.Path().glob("running_*")))
        pathlib.Path(f"running_{attempts + 1}").touch()
        time.sleep(0 if attempts >= config.trainer.max_restarts else 300)

supervisor._FIRST_DELAY_S = 0.1
with exit_with_message():
    run_ppo(load_config(None, sys.argv[1:]), Waits, supervised=True)
"""

GCS = ("gcs_server", signal.SIGKILL, r"Ray's own processes ended \(gcs_server, pid \d+\)")
OTHERS = [
    ("raylet", signal.SIGKILL, r"Ray's own processes ended \(raylet, pid \d+\)"),
    ("ray::Waits", signal.SIGKILL, r"the controller's process died"),
    ("driver", signal.SIGKILL, r"the driver \(pid \d+\) was killed by SIGKILL"),
    ("driver", signal.SIGSTOP, r"the driver \(pid \d+\) was stopped \(SIGSTOP\) and not continued for 5 s"),
]


def named(name: str, family: list[psutil.Process]) -> psutil.Process:
    """The driver is the supervisor's only child."""
    return family[0] if name == "driver" else next(member for member in family if member.name().startswith(name))


def wait_for(happened, process: subprocess.Popen, log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("faults", [[GCS], OTHERS])
def test_what_dies_is_named_and_replaced_and_nothing_of_it_is_left(tmp_path, faults):
    more = ("algorithm.adv_estimator=grpo", f"trainer.max_restarts={len(faults)}")
    arguments = overrides(make_task(tmp_path), tmp_path, *more)
    log = tmp_path / "log.txt"
    command = [sys.executable, "-c", PROGRAM, *arguments]
    with log.open("w") as stream:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=stream, stderr=stream)
    try:
        for number, (name, sent, cause) in enumerate(faults, 1):
            wait_for((tmp_path / f"running_{number}").exists, process, log, 250)
            family = psutil.Process(process.pid).children(recursive=True)
            named(name, family).send_signal(sent)
            restart_line = re.compile(
                rf"restart {number} of {len(faults)} in \d+ s: {cause}.*; starts from the beginning"
            )
            wait_for(lambda restart_line=restart_line: restart_line.search(log.read_text()), process, log, 120)
            assert psutil.wait_procs(family, timeout=60)[1] == []
        assert process.wait() == 0, log.read_text()[-3000:]
    finally:
        process.kill()


TRAINER = """
import os, signal
import psutil
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

class Mine(RayPPOTrainer):
    def _train_step(self, *arguments):
        for process in psutil.process_iter(["name", "cwd"]):
            if self.global_steps == 4 and "RayRank" in process.info["name"] and process.info["cwd"] == os.getcwd():
                process.kill()
        return super()._train_step(*arguments)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_that_dies_in_the_same_step_again_ends_the_run_with_the_cause_last(tmp_path):
    (tmp_path / "mine.py").write_text(TRAINER)
    more = (
        "algorithm.adv_estimator=grpo",
        "data.val_files=[]",
        "trainer.save_freq=1",
        "trainer.total_training_steps=9",
    )
    arguments = overrides(make_task(tmp_path), tmp_path, *more, f"trainer.cls_path={tmp_path}/mine.py:Mine")
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 1, done.stderr[-3000:]
    assert done.stderr.count("\nrestart ") in (1, 2), "2: the first death left step 3 unsaved"
    assert re.search(r"not restarted: it failed twice at the same location \(\w+ of step 4, role \w+\)", done.stderr)
    last = done.stderr.rstrip().splitlines()[-1]
    assert re.fullmatch(
        r"Role \w+, rank 0, host \S+ pid \d+, phase \w+ of step 4\. The same command resumes at step [23] \(.*\)\.",
        last,
    )
