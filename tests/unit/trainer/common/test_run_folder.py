"""The output folder of a run is its own: a second run, and a fresh run in a used folder, are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.training_harness import make_task, overrides, run_training
from verl.config import ConfigError, load_config
from verl.trainer.ppo.state import started
from verl.utils.checkpoint import ownership
from verl.utils.checkpoint.checkpoint_manager import CheckpointManager, find_latest_ckpt_path

HOLDER = """
import sys, time
from verl.utils.checkpoint.ownership import Ownership
owned = Ownership(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict[str, str]:
    return make_task(tmp_path_factory.mktemp("task"))


def command(task: dict[str, str], folder: Path, *more: str) -> list[str]:
    return overrides(task, folder, "data.val_files=[]", "algorithm.adv_estimator=grpo", *more)


def save_step(root: Path, step: int) -> None:
    manager = CheckpointManager(root)
    (manager.begin(step) / "weights").write_bytes(b"x")
    manager.commit(step)


def test_a_folder_that_another_run_holds_is_refused_unless_it_is_only_read(task, tmp_path, monkeypatch):
    monkeypatch.setattr(ownership.Ownership.__init__, "__defaults__", (0,))
    root = tmp_path / "checkpoints"
    held = subprocess.Popen([sys.executable, "-c", HOLDER, str(root)], stdout=subprocess.PIPE, text=True)
    try:
        assert held.stdout is not None
        held.stdout.readline()
        with pytest.raises(ConfigError) as caught:
            started(load_config(None, command(task, tmp_path)), {})
        (problem,) = caught.value.problems
        assert problem.key == "trainer.default_local_dir"
        assert f"another run is writing there: host {ownership.socket.gethostname()}, pid {held.pid}" in problem.why
        only_reads = command(task, tmp_path, "trainer.val_only=True", f"data.val_files={task['val']}")
        started(load_config(None, only_reads), {}).close()
    finally:
        held.kill()
        held.wait()
    started(load_config(None, command(task, tmp_path)), {}).close()


def test_a_trainer_holds_its_folder_to_the_end_and_no_longer(task, tmp_path):
    root = tmp_path / "checkpoints"
    run_training(command(task, tmp_path, "trainer.total_training_steps=1"))
    assert (root / ownership.OWNER).read_bytes() == b"", "given back"
    assert root.resolve() not in ownership.Ownership._held


def test_a_fresh_run_in_a_used_folder_is_refused_with_what_can_be_done(task, tmp_path):
    save_step(tmp_path / "checkpoints", 7)
    with pytest.raises(ConfigError) as caught:
        started(load_config(None, command(task, tmp_path, "trainer.resume_mode=disable")), {})
    (problem,) = caught.value.problems
    assert "it has 1 steps of another run (global_step_7 is the newest)" in problem.why
    assert "trainer.used_dir=move_aside" in problem.fix


def test_by_key_the_steps_of_another_run_are_moved_aside_whole(task, tmp_path):
    root = tmp_path / "checkpoints"
    save_step(root, 7)
    fresh = ("trainer.resume_mode=disable", "trainer.used_dir=move_aside", "trainer.total_training_steps=1")
    trainer = run_training(command(task, tmp_path, *fresh))
    assert [row["step"] for row in trainer.history] == [1]
    assert [path.name for path in root.glob("global_step_*")] == ["global_step_1"]
    (aside,) = root.glob("before_*")
    assert find_latest_ckpt_path(aside) == str(aside / "global_step_7")
    assert (aside / "latest").read_text() == "global_step_7"
    assert (root / "latest").read_text() == "global_step_1"


def test_a_fresh_run_is_not_mixed_into_the_copies_of_another(task, tmp_path):
    copies = tmp_path / "copies"
    manager = CheckpointManager(tmp_path / "elsewhere", remote=str(copies))
    (manager.begin(3) / "weights").write_bytes(b"x")
    manager.commit(3)
    manager.copies.wait(10)
    keys = ("trainer.resume_mode=disable", f"trainer.default_hdfs_dir={copies}")
    with pytest.raises(ConfigError, match=r"trainer.default_hdfs_dir .* copies of another run's steps .global_step_3"):
        started(load_config(None, command(task, tmp_path, *keys)), {})
