"""The last line of a run names the newest whole step and the model in it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from verl.trainer.recovery.exit_messages import describe_next_commands, log_finished
from verl.utils.checkpoint.checkpoint_manager import CheckpointManager


def save(root: Path, step: int, folder: str) -> None:
    manager = CheckpointManager(root)
    place = manager.begin(step) / folder
    place.mkdir(parents=True)
    (place / "weights").write_bytes(b"x")
    manager.commit(step)


def last_line(root: Path, part: str, caplog: pytest.LogCaptureFixture) -> str:
    with caplog.at_level("INFO"):
        log_finished(SimpleNamespace(default_local_dir=str(root)), part)
    return caplog.records[-1].getMessage()


@pytest.mark.parametrize(("part", "folder"), [("actor", "actor/huggingface"), (".", "huggingface")])
def test_the_exported_model_of_the_newest_step_is_named(tmp_path, caplog, part, folder):
    for step in (1, 2):
        save(tmp_path, step, folder)
    assert last_line(tmp_path, part, caplog) == f"Training finished at step 2. Model: {tmp_path}/global_step_2/{folder}"


def test_a_damaged_step_is_passed_over(tmp_path, caplog):
    for step in (1, 2):
        save(tmp_path, step, "huggingface")
    (tmp_path / "global_step_2" / "huggingface" / "weights").write_bytes(b"")
    assert last_line(tmp_path, ".", caplog).endswith(f"{tmp_path}/global_step_1/huggingface")


def test_a_checkpoint_without_an_exported_model_names_the_command_that_writes_one(tmp_path, caplog):
    save(tmp_path, 5, "actor")
    line = last_line(tmp_path, "actor", caplog)
    assert f"{tmp_path}/global_step_5/actor" in line
    assert "verl.model_merger" in line


def test_a_run_that_saved_nothing_says_so(tmp_path, caplog):
    assert str(tmp_path) in last_line(tmp_path, "actor", caplog)


@pytest.mark.parametrize(
    ("folder", "command"),
    [
        ("actor/huggingface", "  serve:    verl serve --model {root}/global_step_3/actor/huggingface"),
        (
            "actor",
            "  export:   verl merge --backend megatron --local_dir {root}/global_step_3/actor"
            " --target_dir {root}/global_step_3/actor/huggingface",
        ),
    ],
)
def test_the_next_commands_use_the_newest_step(tmp_path, caplog, folder, command):
    save(tmp_path, 3, folder)
    trainer = SimpleNamespace(
        default_local_dir=str(tmp_path), logger=["console"], tracking_dir=None, project_name="p", experiment_name="e"
    )
    expected = [
        command.format(root=tmp_path),
        "  train on: the same command with a larger trainer.total_training_steps",
    ]
    assert describe_next_commands(trainer, "actor", "megatron") == expected
    trainer.logger = ["console", "file"]
    with caplog.at_level("INFO"):
        log_finished(trainer, "actor", "megatron")
    assert caplog.messages[-1].splitlines() == [*expected, "  summary:  verl summary runs/p/e"]
