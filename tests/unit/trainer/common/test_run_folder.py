"""The output folder of a run is its own: a second run is refused, steps of an earlier run are moved aside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.training_harness import make_task, overrides, run_training
from verl.config import ConfigError, load_config
from verl.trainer.ppo.state import check_run_start
from verl.utils.checkpoint import folders, remote
from verl.utils.checkpoint.checkpoint_manager import CheckpointManager, find_latest_ckpt_path
from verl.utils.checkpoint.folders import move_aside
from verl.utils.fs import filesystem_of

HOLDER = """
import sys, time
from verl.utils.checkpoint.folders import FolderOwnership
owned = FolderOwnership(sys.argv[1])
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


def save_copied_step(root: Path, step: int, copies: str) -> None:
    manager = CheckpointManager(root, remote=copies)
    (manager.begin(step) / "weights").write_bytes(b"x")
    manager.commit(step)
    assert manager.uploader is not None
    assert manager.uploader.wait(10) == []


def test_a_folder_that_another_run_holds_is_refused_unless_it_is_only_read(task, tmp_path, monkeypatch):
    monkeypatch.setattr(folders.FolderOwnership.__init__, "__defaults__", (0,))
    root = tmp_path / "checkpoints"
    held = subprocess.Popen([sys.executable, "-c", HOLDER, str(root)], stdout=subprocess.PIPE, text=True)
    try:
        assert held.stdout is not None
        held.stdout.readline()
        with pytest.raises(ConfigError) as caught:
            check_run_start(load_config(None, command(task, tmp_path)), {})
        (problem,) = caught.value.problems
        assert problem.key == "trainer.default_local_dir"
        assert f"another run is writing there: host {folders.socket.gethostname()}, pid {held.pid}" in problem.why
        only_reads = command(task, tmp_path, "trainer.val_only=True", f"data.val_files={task['val']}")
        check_run_start(load_config(None, only_reads), {}).close()
    finally:
        held.kill()
        held.wait()
    check_run_start(load_config(None, command(task, tmp_path)), {}).close()


def test_a_trainer_holds_its_folder_to_the_end_and_no_longer(task, tmp_path):
    root = tmp_path / "checkpoints"
    run_training(command(task, tmp_path, "trainer.total_training_steps=1"))
    assert (root / folders.OWNER_FILE).read_bytes() == b"", "given back"
    assert root.resolve() not in folders.FolderOwnership.held


def test_disable_starts_from_scratch_in_a_used_folder_and_logs_where_its_steps_are(task, tmp_path, caplog):
    root = tmp_path / "checkpoints"
    save_step(root, 7)
    trainer = run_training(command(task, tmp_path, "trainer.resume_mode=disable", "trainer.total_training_steps=1"))
    assert [row["step"] for row in trainer.history] == [1]
    assert [path.name for path in root.glob("global_step_*")] == ["global_step_1"]
    (aside,) = root.glob("before_*")
    assert find_latest_ckpt_path(aside) == str(aside / "global_step_7")
    assert (aside / "latest").read_text() == "global_step_7"
    assert (root / "latest").read_text() == "global_step_1"
    (moved,) = [record.getMessage() for record in caplog.records if "moved" in record.getMessage()]
    assert str(aside) in moved


def test_steps_stay_in_place_where_the_run_does_not_start(task, tmp_path):
    save_step(tmp_path / "checkpoints", 7)
    (tmp_path / "a_file").write_text("")
    keys = ("trainer.resume_mode=disable", f"trainer.rollout_data_dir={tmp_path / 'a_file'}")
    with pytest.raises(ConfigError, match=r"trainer.rollout_data_dir"):
        check_run_start(load_config(None, command(task, tmp_path, *keys)), {})
    assert (tmp_path / "checkpoints" / "global_step_7").is_dir()


def test_by_key_a_used_folder_and_its_copies_are_refused(task, tmp_path):
    copies = str(tmp_path / "copies")
    save_step(tmp_path / "checkpoints", 7)
    save_copied_step(tmp_path / "elsewhere", 3, copies)
    keys = ("trainer.resume_mode=disable", "trainer.used_dir=refuse", f"trainer.default_hdfs_dir={copies}")
    with pytest.raises(ConfigError) as caught:
        check_run_start(load_config(None, command(task, tmp_path, *keys)), {})
    problems = {problem.key: problem for problem in caught.value.problems}
    assert "global_step_7" in problems["trainer.default_local_dir"].why
    assert "global_step_3" in problems["trainer.default_hdfs_dir"].why
    assert "trainer.used_dir=move_aside" in problems["trainer.default_hdfs_dir"].fix


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_copies_of_an_earlier_run_are_moved_aside_whole(task, tmp_path, caplog, scheme):
    """Object stores have no rename: fsspec copies and deletes."""
    copies = f"{scheme}{tmp_path / 'copies'}"
    save_copied_step(tmp_path / "elsewhere", 3, copies)
    keys = ("trainer.resume_mode=disable", f"trainer.default_hdfs_dir={copies}")
    start = check_run_start(load_config(None, command(task, tmp_path, *keys)), {})
    assert start.resume_from is None
    start.close()
    fs, inside = filesystem_of(copies)
    (aside,) = [str(path).rpartition("/")[2] for path in fs.ls(inside, detail=False)]
    assert aside.startswith("before_")
    assert f"{copies}/{aside}" in caplog.text
    assert remote.remote_steps(f"{copies}/{aside}") == ["global_step_3"]
    manifest = remote.read_remote_manifest(f"{copies}/{aside}", "global_step_3")
    assert manifest is not None
    assert fs.cat_file(f"{inside}/{aside}/global_step_3/weights") == b"x"
    assert fs.cat_file(f"{inside}/{aside}/latest") == b"global_step_3"


@pytest.mark.parametrize("fails_at", [0, 1, 2, 3, 4])
def test_an_interrupted_move_of_copies_is_completed_by_the_next(tmp_path, monkeypatch, caplog, fails_at):
    copies = f"memory://{tmp_path / 'copies'}"
    for step in (3, 4):
        save_copied_step(tmp_path / "elsewhere", step, copies)
    fs, inside = filesystem_of(copies)
    move, calls = type(fs).mv, []

    def interrupted(self, source, target, **options):
        calls.append(source)
        if len(calls) == fails_at + 1:
            raise KeyboardInterrupt
        move(self, source, target, **options)

    monkeypatch.setattr(type(fs), "mv", interrupted)
    if fails_at < 4:  # two steps and two files
        with pytest.raises(KeyboardInterrupt):
            remote.move_remote_aside(copies)
        assert "moving 2 steps of an earlier run" in caplog.text, "before the first byte is copied"
        assert remote.remote_steps(copies), "the next call knows that there is something to move"
    remote.move_remote_aside(copies)
    left = [str(path).rpartition("/")[2] for path in fs.ls(inside, detail=False)]
    assert {name.partition("_")[0] for name in left} == {"before"}
    assert remote.move_remote_aside(copies) is None


def test_latest_files_without_steps_are_moved_too(tmp_path):
    copies = f"memory://{tmp_path / 'copies'}"
    fs, inside = filesystem_of(copies)
    fs.makedirs(inside)
    fs.pipe_file(f"{inside}/latest", b"global_step_3")
    assert remote.move_remote_aside(copies) is not None
    assert not fs.exists(f"{inside}/latest")


def test_an_interrupted_move_of_local_steps_is_completed_by_the_next(tmp_path, monkeypatch):
    save_step(tmp_path, 3)
    rename, calls = os.rename, []

    def interrupted(source, target):
        calls.append(source)
        if len(calls) == 2:
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            move_aside(tmp_path)
    move_aside(tmp_path)
    assert not [name for name in ("latest", "global_step_3") if (tmp_path / name).exists()]
