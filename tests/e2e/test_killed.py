"""Killed at any moment, a run resumes from a complete step, if possible by itself; a stop signal saves and exits 0."""

from __future__ import annotations

import os
import pty
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.training_harness import make_task, overrides
from verl.utils.checkpoint.checkpoint_manager import CheckpointManager, find_latest_ckpt_path
from verl.utils.checkpoint.manifest import read_manifest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

STEPS = 10
_started: list[subprocess.Popen] = []


@pytest.fixture(autouse=True)
def kill_remaining_runs() -> Iterator[None]:
    """Kill runs of a failed test, which would slow down the following tests."""
    yield
    while _started:
        if (process := _started.pop()).poll() is None:
            kill_everything(process)


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict[str, str]:
    return make_task(tmp_path_factory.mktemp("task"))


def start(task: dict[str, str], folder: Path, *more: str) -> subprocess.Popen:
    """The real command, as a user runs it: Ray, one rank."""
    folder.mkdir(exist_ok=True)
    run = overrides(
        task,
        folder,
        "algorithm.adv_estimator=grpo",
        "data.val_files=[]",
        "trainer.save_freq=1",
        "trainer.logger=[console]",
        *more,
    )
    environment = {**os.environ}
    log = (folder / "log.txt").open("a")
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *run]
    process = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=folder, start_new_session=True
    )
    _started.append(process)
    return process


def wait_for_step(folder: Path, process: subprocess.Popen, step: int, timeout: float = 400) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        assert process.poll() is None, (folder / "log.txt").read_text()[-3000:]
        if (folder / "checkpoints" / f"global_step_{step}").is_dir():
            return
        time.sleep(0.1)
    raise AssertionError(f"step {step} was not saved in {timeout} s\n" + (folder / "log.txt").read_text()[-3000:])


def kill_everything(process: subprocess.Popen) -> None:
    """Send SIGKILL to the driver and to every process of its cluster, as in a power failure."""
    family = psutil.Process(process.pid).children(recursive=True)
    for member in [psutil.Process(process.pid), *family]:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


def latest_step(folder: Path) -> int:
    path = find_latest_ckpt_path(folder / "checkpoints")
    return int(Path(path).name.rsplit("_", 1)[1]) if path else 0


def survive(task: dict[str, str], folder: Path, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    reached = 0
    for _ in range(kills):
        process = start(task, folder, "trainer.total_training_steps=1000")
        wait_for_step(folder, process, reached + 1)
        time.sleep(rng.uniform(0, 1.5))  # in the middle of a step, or of a save
        kill_everything(process)
        latest = latest_step(folder)
        assert latest > reached, "a step saved before the kill is complete"
        reached = latest
    process = start(task, folder, f"trainer.total_training_steps={reached + 1}")
    assert process.wait() == 0, (folder / "log.txt").read_text()[-3000:]
    assert latest_step(folder) == reached + 1
    assert f"global_step_{reached}: step {reached}" in (folder / "log.txt").read_text(), (
        "it resumed from the complete step"
    )
    assert CheckpointManager.verify(folder / "checkpoints" / f"global_step_{reached + 1}") == []


def rank_of(process: subprocess.Popen) -> psutil.Process:
    family = psutil.Process(process.pid).children(recursive=True)
    (rank,) = [member for member in family if member.name().startswith("ray::RayRank")]
    return rank


def final_files(folder: Path) -> dict[str, int]:
    """Return a checksum per file of the actor's weights and optimizer state in the last step."""
    files = read_manifest(folder / "checkpoints" / f"global_step_{STEPS}").files
    checksums = {name: record.crc32 for name, record in files.items() if name.endswith((".distcp", ".safetensors"))}
    assert len(checksums) >= 3
    return checksums


@pytest.mark.slow
def test_killed_supervisor_and_killed_rank_cost_no_bit_of_the_final_weights(task, tmp_path):
    """The first is started again by hand, with the same command; the second by itself."""
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    total = f"trainer.total_training_steps={STEPS}"
    reference = start(task, undisturbed, total)
    process = start(task, disturbed, total)
    wait_for_step(disturbed, process, 1)
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert psutil.wait_procs(family, timeout=60)[1] == [], "nothing outlives the supervisor"
    reached = latest_step(disturbed)

    process = start(task, disturbed, total)
    wait_for_step(disturbed, process, reached + 2)
    rank_of(process).kill()
    assert process.wait() == 0, (disturbed / "log.txt").read_text()[-3000:]
    (restart,) = re.findall(r"^restart .*", (disturbed / "log.txt").read_text(), re.MULTILINE)
    match = re.match(r"restart 1 of 3 in 2 s: worker process died: .* \(\w+ of step (\d+), role (\w+)\); (.*)", restart)
    assert match, restart
    assert match[2] == "actor_rollout"
    assert re.match(rf"resumes at step \d+ \({disturbed}/checkpoints/global_step_\d+\), steps? .* repeated", match[3])
    assert reference.wait(timeout=200) == 0, (undisturbed / "log.txt").read_text()[-3000:]
    assert final_files(disturbed) == final_files(undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_killed_many_times_a_run_continues_from_a_whole_step(task, tmp_path):
    survive(task, tmp_path, kills=20, seed=1)


def wait_for_first_step(folder: Path, process: subprocess.Popen) -> None:
    """Wait until the first optimizer step is done, before any checkpoint exists."""
    deadline = time.monotonic() + 400
    while not (folder / "checkpoints" / "debug_step_1.pt").exists():
        assert process.poll() is None, (folder / "log.txt").read_text()[-3000:]
        assert time.monotonic() < deadline, (folder / "log.txt").read_text()[-3000:]
        time.sleep(0.1)


@pytest.mark.slow
def test_sigterm_to_the_whole_process_group_finishes_the_step_saves_and_exits_0(task, tmp_path):
    """As `timeout` and schedulers send it: to Ray's processes too, were they of the group."""
    process = start(
        task, tmp_path, "trainer.total_training_steps=1000", "trainer.save_freq=-1", "trainer.dump_steps=[1]"
    )
    wait_for_first_step(tmp_path, process)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait() == 0, (tmp_path / "log.txt").read_text()[-3000:]
    step = latest_step(tmp_path)
    assert step >= 1
    *_, last = (tmp_path / "log.txt").read_text().splitlines()
    assert last.startswith(f"stopped by SIGTERM; the same command resumes at step {step} ")


@pytest.mark.slow
def test_sigterm_that_leaves_little_time_gives_up_a_long_step_and_saves_the_one_before(tmp_path):
    task = make_task(tmp_path, max_position_embeddings=512)
    long = ("data.max_response_length=400", "actor_rollout_ref.rollout.ignore_eos=True", "trainer.save_within=1")
    steps = ("trainer.total_training_steps=1000", "trainer.save_freq=-1", "trainer.dump_steps=[1]")
    process = start(task, tmp_path, *steps, *long)
    wait_for_first_step(tmp_path, process)
    while "\nstep 1: " not in (tmp_path / "log.txt").read_text():  # it is over
        assert process.poll() is None, (tmp_path / "log.txt").read_text()[-3000:]
        time.sleep(0.05)
    time.sleep(0.3)  # into the generation of the second, which takes longer
    signalled_at = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0, (tmp_path / "log.txt").read_text()[-3000:]
    log = (tmp_path / "log.txt").read_text()
    *_, last = log.splitlines()
    assert last.startswith("stopped by SIGTERM: step 2 given up after "), (log[-3000:], time.monotonic() - signalled_at)
    assert "; the same command resumes at step 1 " in last
    assert CheckpointManager.verify(tmp_path / "checkpoints" / "global_step_1") == []


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [False, True], ids=["plain", "nohup"])
def test_a_terminal_that_closes(task, tmp_path, ignored):
    """The step is finished and saved; under `nohup` the run goes on to its end. Either way it says so in a file."""
    ours, theirs = pty.openpty()
    arguments = overrides(task, tmp_path, "algorithm.adv_estimator=grpo", "data.val_files=[]", "trainer.save_freq=1")

    def before() -> None:
        os.close(os.open(os.ttyname(1), os.O_RDWR))  # of a session without a terminal: it becomes its own
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "verl.trainer.main_ppo",
            *arguments,
            f"trainer.total_training_steps={4 if ignored else 999}",
        ],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=tmp_path,
        start_new_session=True,
        preexec_fn=before,
    )
    os.close(theirs)
    reading = threading.Thread(target=read_until_step, args=(ours, tmp_path / "checkpoints" / "global_step_1"))
    reading.start()
    reading.join(timeout=200)
    kept = tmp_path / "checkpoints" / "after_the_terminal.log"
    assert process.wait() == 0, kept.read_text()[-3000:]
    lines = kept.read_text().splitlines()
    if ignored:
        assert latest_step(tmp_path) == 4
    else:
        assert lines[-1].startswith(f"stopped by SIGHUP; the same command resumes at step {latest_step(tmp_path)} ")


def read_until_step(terminal: int, step: Path) -> None:
    """Read the output until the step is saved, then close the terminal."""
    while not step.is_dir():
        os.read(terminal, 4096)
    os.close(terminal)
