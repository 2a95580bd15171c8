"""Weights that an update has ruined: noticed at the update, at a save or by the rollout, never saved, said truly."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file, save_file

from tests.support.training_harness import close, make_task, make_trainer, overrides
from verl.trainer.common.training_health import NonFiniteError
from verl.workers.engine.common import optim

ACTOR = "actor_rollout_ref.actor"
ONE_UPDATE = f"{ACTOR}.ppo_mini_batch_size=8"


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"), rows=8)


def ruined(task, tmp_path, monkeypatch, *more: str) -> tuple[str, list[str]]:
    """What a run says that nothing kept from an absurd update, and the checkpoints there are then."""
    monkeypatch.setattr(optim, "MAX_RELATIVE_STEP", float("inf"))
    arguments = overrides(
        task, tmp_path, "algorithm.adv_estimator=grpo", "data.val_files=[]", "trainer.total_training_steps=3", *more
    )
    trainer = make_trainer(arguments)
    try:
        trainer.init_workers()
        with pytest.raises(NonFiniteError) as caught:
            trainer.fit()
    finally:
        close(trainer)
    folder = tmp_path / "checkpoints"
    saved = sorted(path.name for path in folder.glob("global_step_*")) if folder.exists() else []
    now = trainer.config.actor_rollout_ref.actor.optim.lr
    assert f"{ACTOR}.optim.lr ({now:g} → {now / 2:g})" in str(caught.value), "the value of this run"
    return str(caught.value), saved


def test_the_update_that_lost_the_weights_is_named(task, tmp_path, monkeypatch):
    """Weights of 1e10 are finite numbers; the second mini-batch shows that they give none."""
    said, saved = ruined(task, tmp_path, monkeypatch, f"{ACTOR}.optim.lr=1e10", "trainer.save_freq=1")
    assert "update 1 of step 1 made the weights of the actor unusable" in said
    assert "the same command starts from the beginning: no step was saved" in said
    assert saved == []
    assert (tmp_path / "checkpoints" / "debug_step_1.pt").exists()


def test_weights_that_overflow_are_noticed_without_another_pass(task, tmp_path, monkeypatch):
    said, _ = ruined(task, tmp_path, monkeypatch, f"{ACTOR}.optim.lr=1e25", ONE_UPDATE)
    assert "update 1 of step 1 made the weights of the actor unusable" in said
    assert "The batch of step 1 is dumped" in said
    assert (tmp_path / "checkpoints" / "debug_step_1.pt").exists()


def test_a_step_that_lost_them_is_not_saved_and_the_one_before_is_where_to_go_on(task, tmp_path, monkeypatch):
    """A rate that rises from 0: step 1 changes nothing and is saved, step 2 is the end."""
    rising = (f"{ACTOR}.optim.lr=1e12", f"{ACTOR}.optim.lr_warmup_steps=100", ONE_UPDATE)
    said, saved = ruined(task, tmp_path, monkeypatch, *rising, "trainer.save_freq=1")
    assert said.startswith("step 2: the weights, or the model's outputs, are not finite: no checkpoint is saved.")
    assert "the same command resumes at step 1" in said
    assert saved == ["global_step_1"]


def test_where_nothing_else_noticed_it_the_rollout_ends_the_run_in_the_same_words(task, tmp_path, monkeypatch):
    said, _ = ruined(task, tmp_path, monkeypatch, f"{ACTOR}.optim.lr=1e10", ONE_UPDATE)
    assert said.startswith("step 2: rollout: weights of version 1 give log-prob nan")
    assert "Earlier updates made the weights unusable" in said


@pytest.mark.parametrize("validates", [False, True])
def test_nan_in_the_initial_weights_is_attributed_to_the_model_not_to_updates(tmp_path, validates):
    task = make_task(tmp_path / "task", rows=8)
    (file,) = (tmp_path / "task" / "model").glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("mlp.down_proj.weight"))
    tensors[name][0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    arguments = overrides(task, tmp_path, "algorithm.adv_estimator=grpo", f"trainer.val_before_train={validates}")
    trainer = make_trainer(arguments)
    try:
        trainer.init_workers()
        with pytest.raises(NonFiniteError) as caught:
            trainer.fit()
    finally:
        close(trainer)
    said = str(caught.value)
    assert (
        f"No update has changed the weights: they are the weights of actor_rollout_ref.model.path={task['model']}"
        in said
    )
    assert f"whose files contain NaN or inf in {name}" in said
    assert "lr" not in said.replace(task["model"], "")
    assert "Earlier updates" not in said
