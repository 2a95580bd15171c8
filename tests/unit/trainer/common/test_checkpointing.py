"""Checkpoints of a whole run: what stays of older steps, and that a run goes on from what stayed."""

from __future__ import annotations

import json

import pytest

from tests.support.training_harness import make_task, overrides, run_training
from verl.config import load_config


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict[str, str]:
    return make_task(tmp_path_factory.mktemp("task"))


def test_actor_and_critic_are_kept_by_their_own_limits_and_the_run_resumes(task, tmp_path):
    def run(steps: int):
        limits = ("trainer.max_actor_ckpt_to_keep=2", "trainer.max_critic_ckpt_to_keep=1")
        more = ("data.val_files=[]", "trainer.save_freq=1", f"trainer.total_training_steps={steps}")
        return run_training(overrides(task, tmp_path, *more, *limits))

    run(3)
    root = tmp_path / "checkpoints"
    assert sorted(path.name for path in root.glob("global_step_*")) == ["global_step_2", "global_step_3"]
    beside = {"trainer.pt", "config.json", "initial_weights.json", "manifest.json"}
    assert parts(root / "global_step_2") == {"actor", *beside}
    assert parts(root / "global_step_3") == {"actor", "critic", *beside}
    resumed = run(4)
    assert [row["step"] for row in resumed.history] == [4], "it went on from step 3"
    assert parts(root / "global_step_3") == {"actor", *beside}
    assert "critic" in parts(root / "global_step_4")


def test_the_stored_configuration_has_no_secrets(task, tmp_path):
    secret = "trainer.record.alert_url=https://hooks.example/s3cr3t"
    run_training(overrides(task, tmp_path, "data.val_files=[]", "trainer.total_training_steps=1", secret))
    (step,) = (tmp_path / "checkpoints").glob("global_step_*")
    config = json.loads((step / "config.json").read_text())
    assert config["trainer"]["record"]["alert_url"] == "[secret]"
    assert b"s3cr3t" not in b"".join(path.read_bytes() for path in step.rglob("*") if path.is_file())


def parts(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_without_a_limit_of_its_own_the_critic_is_kept_as_the_actor_is(task, tmp_path):
    config = load_config(None, overrides(task, tmp_path, "trainer.max_actor_ckpt_to_keep=3"))
    assert config.trainer.max_critic_ckpt_to_keep == 3
    config = load_config(None, overrides(task, tmp_path, "trainer.max_critic_ckpt_to_keep=1"))
    assert (config.trainer.max_actor_ckpt_to_keep, config.trainer.max_critic_ckpt_to_keep) == (None, 1)
