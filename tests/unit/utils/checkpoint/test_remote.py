"""Copies of steps: in the background, in order, tried again until they succeed, and never a reason to fill the disk."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import fsspec
import pytest

from verl.utils.checkpoint import remote
from verl.utils.checkpoint.checkpoint_manager import CheckpointManager, resolve_resume

PATIENCE = 120.0


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.0)


class Store:
    """A folder as the remote, through fsspec's own local file system, whose uploads fail or wait as a test says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.failures, self.uploads = folder, 0, []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.reached = threading.Event()
        files = type(fsspec.filesystem("file"))
        put = files.put

        def put_or_fail(fs, *args, **kwargs) -> None:
            self.reached.set()
            self.may_go_on.wait(PATIENCE)
            if self.failures:
                self.failures -= 1
                raise ConnectionError("the store is away")
            self.uploads.append(Path(args[1][0]).parent.name)
            put(fs, *args, **kwargs)

        monkeypatch.setattr(files, "put", put_or_fail)

    def steps(self) -> list[str]:
        """Those that are whole there."""
        return sorted(path.name for path in self.folder.glob("g*") if not CheckpointManager.verify(path))


@pytest.fixture
def store(tmp_path, monkeypatch) -> Store:
    return Store(tmp_path / "store", monkeypatch)


def save(manager: CheckpointManager, step: int) -> None:
    (manager.begin(step) / "weights").write_bytes(str(step).encode())
    manager.commit(step)


def local(manager: CheckpointManager) -> list[str]:
    return sorted(path.name for path in manager.root.glob("g*"))


def test_a_remote_that_fails_twice_and_then_works_costs_nothing(tmp_path, store, caplog):
    store.failures = 2
    manager = CheckpointManager(tmp_path / "run", remote=str(store.folder))
    with caplog.at_level(logging.WARNING, logger="verl"):
        save(manager, 1)
        assert manager.uploader.wait(PATIENCE) == []
    assert store.steps() == ["global_step_1"]
    assert manager.uploader.failed == 0
    assert "failed (2 of 4): ConnectionError: the store is away" in caplog.text


def test_saving_goes_on_while_copies_wait_and_all_that_are_kept_follow_in_order(tmp_path, store):
    manager = CheckpointManager(tmp_path / "run", remote=str(store.folder))
    store.may_go_on.clear()
    for step in (1, 2, 10):
        save(manager, step)
    assert local(manager) == ["global_step_1", "global_step_10", "global_step_2"]
    assert store.steps() == []
    store.may_go_on.set()
    assert manager.uploader.wait(PATIENCE) == []
    assert store.uploads == ["global_step_1", "global_step_2", "global_step_10"]
    assert (store.folder / "latest").read_text() == "global_step_10"


def test_what_could_not_be_copied_is_counted_said_and_tried_with_the_next_save(tmp_path, store, caplog):
    manager = CheckpointManager(tmp_path / "run", remote=str(store.folder))
    store.failures = 2 * remote.ATTEMPTS
    with caplog.at_level(logging.ERROR, logger="verl"):
        save(manager, 1)
        assert manager.uploader.wait(PATIENCE) == ["global_step_1"], "the last try of a run fails too"
    assert manager.uploader.failed == 2
    assert "only local for now: global_step_1. The next save tries again." in caplog.text
    save(manager, 2)
    assert manager.uploader.wait(PATIENCE) == []
    assert store.steps() == ["global_step_1", "global_step_2"]


def test_the_step_being_copied_is_kept_those_that_wait_are_not(tmp_path, store):
    """A store that is too slow neither loses the copy under way nor fills the disk."""
    manager = CheckpointManager(tmp_path / "run", max_to_keep=1, remote=str(store.folder))
    store.may_go_on.clear()
    save(manager, 1)
    assert store.reached.wait(PATIENCE)
    for step in (2, 3, 4):
        save(manager, step)
        assert local(manager) == ["global_step_1", f"global_step_{step}"]
    store.may_go_on.set()
    assert manager.uploader.wait(PATIENCE) == []
    assert store.steps() == ["global_step_1", "global_step_4"]
    assert local(manager) == ["global_step_4"], "and it goes when it is copied"


def test_the_end_of_a_run_waits_only_so_long_and_names_what_is_missing(tmp_path, store):
    manager = CheckpointManager(tmp_path / "run", remote=str(store.folder))
    store.may_go_on.clear()
    save(manager, 1)
    save(manager, 2)
    assert manager.uploader.wait(0.1) == ["global_step_1", "global_step_2"]
    store.may_go_on.set()
    assert manager.uploader.wait(PATIENCE) == []


def test_what_a_killed_run_did_not_copy_the_next_one_does(tmp_path, store):
    first = CheckpointManager(tmp_path / "run", remote=str(store.folder))
    save(first, 1)
    assert first.uploader.wait(PATIENCE) == []
    alone = CheckpointManager(tmp_path / "run")
    save(alone, 2)
    unfinished = store.folder / "global_step_2"
    unfinished.mkdir()
    (unfinished / "weights").write_bytes(b"2")
    over = CheckpointManager(tmp_path / "run", remote=str(store.folder))
    assert over.uploader.wait(PATIENCE) == [], "a run that has nothing left to save does it at its end"
    assert store.uploads == ["global_step_1", "global_step_2"]
    again = CheckpointManager(tmp_path / "run", remote=str(store.folder))
    save(again, 3)
    assert again.uploader.wait(PATIENCE) == []
    assert store.uploads == ["global_step_1", "global_step_2", "global_step_3"]
    assert resolve_resume("auto", tmp_path / "new", remote=str(store.folder)).name == "global_step_3"
    assert remote.read_remote_manifest(str(store.folder), "global_step_2").step == 2


def test_a_step_that_cannot_be_deleted_costs_neither_the_save_nor_the_copies(tmp_path, store, monkeypatch, caplog):
    def fail(*_):
        raise OSError(28, "No space left on device")

    manager = CheckpointManager(tmp_path / "run", max_to_keep=1, remote=str(store.folder))
    with monkeypatch.context() as full, caplog.at_level(logging.WARNING, logger="verl"):
        full.setattr("verl.utils.checkpoint.checkpoint_manager.apply_limits", fail)
        for step in (1, 2):
            save(manager, step)
            assert manager.uploader.wait(PATIENCE) == []
        assert store.steps() == local(manager) == ["global_step_1", "global_step_2"]
    assert "steps over the limit could not be deleted: [Errno 28] No space left on device" in caplog.text
    save(manager, 3)
    assert manager.uploader.wait(PATIENCE) == []
    assert local(manager) == ["global_step_3"]
