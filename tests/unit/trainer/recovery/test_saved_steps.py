"""Where the next attempt of a command goes on: at its own newest whole step, whatever lay in its folder before."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verl.trainer.recovery.supervisor import SavedSteps
from verl.utils.checkpoint.checkpoint_manager import CheckpointManager
from verl.utils.checkpoint.folders import move_aside


def config(root: Path, mode: str, path: str | None = None) -> Any:
    trainer = SimpleNamespace(default_local_dir=str(root), resume_mode=mode, resume_from_path=path)
    return SimpleNamespace(trainer=trainer)


def save(root: Path, step: int) -> Path:
    manager = CheckpointManager(root)
    (manager.begin(step) / "weights").write_bytes(bytes(step))
    return manager.commit(step)


@pytest.mark.parametrize("mode", ["auto", "disable", "resume_path"])
def test_before_a_step_is_saved_the_next_attempt_begins_as_the_first(tmp_path, mode):
    old = save(tmp_path, 5)
    given = config(tmp_path, mode, str(old))
    assert SavedSteps(given.trainer).resume_config(given) is given


def test_auto_stays_auto_for_it_finds_remote_copies_too(tmp_path):
    given = config(tmp_path, "auto")
    steps = SavedSteps(given.trainer)
    save(tmp_path, 1)
    assert steps.resume_config(given) is given


def test_steps_that_were_moved_aside_are_not_gone_on_from_and_own_ones_are(tmp_path):
    """`disable` with `used_dir=move_aside`: serials of the folder begin anew, and so do numbers of steps."""
    save(tmp_path, 5)
    given = config(tmp_path, "disable")
    steps = SavedSteps(given.trainer)
    move_aside(tmp_path)
    assert steps.newest() is None
    mine = save(tmp_path, 5)
    changed = steps.resume_config(given).trainer
    assert (changed.resume_mode, changed.resume_from_path) == ("resume_path", str(mine))
    assert given.trainer.resume_mode == "disable", "the command itself means what it says"


def test_a_damaged_step_is_passed_over_but_never_for_one_of_another_run(tmp_path):
    start, other = save(tmp_path, 5), save(tmp_path, 9)
    given = config(tmp_path, "resume_path", str(start))
    steps = SavedSteps(given.trainer)
    sixth, seventh = save(tmp_path, 6), save(tmp_path, 7)
    (seventh / "weights").write_bytes(b"")
    assert steps.newest() == sixth
    (sixth / "weights").unlink()
    assert steps.newest() is None
    assert other.is_dir()
    assert steps.resume_config(given).trainer.resume_from_path == str(start)


def test_every_save_has_a_name_of_its_own(tmp_path):
    steps = SavedSteps(config(tmp_path, "auto").trainer)
    assert steps.newest_id() is None
    save(tmp_path, 1)
    first = steps.newest_id()
    assert steps.newest_id() == first
    save(tmp_path, 1)
    assert steps.newest_id() != first


def test_describe_restart_is_said_in_steps(tmp_path):
    steps = SavedSteps(config(tmp_path, "auto").trainer)
    assert steps.describe_restart(None) == "starts from the beginning"
    assert steps.describe_restart(2) == "starts from the beginning, steps 1-2 are repeated"
    save(tmp_path, 12)
    place = f"resumes at step 12 ({tmp_path}/global_step_12)"
    assert steps.describe_restart(12) == place
    assert steps.describe_restart(13) == f"{place}, step 13 is repeated"
    assert steps.describe_restart(14) == f"{place}, steps 13-14 are repeated"
