"""A failed save or validation costs itself: the run goes on, says so and counts it; some failures still end it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.support.training_harness import close, make_task, make_trainer, overrides
from verl.config import ConfigError
from verl.inference.engine import Engine
from verl.protocol import DataProto
from verl.single_controller.base.worker_group import Failure, HangError, WorkerCallError, WorkerDiedError
from verl.trainer.common.training_health import NonFiniteError
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.recovery.step_end import SAVE, VALIDATION, NonFatalFailures, UnsavedRunError, is_fatal
from verl.workers.reward_manager.naive import RewardError

ODD_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1, "acc": [1, 2], "nested": {"a": 1}}
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict[str, str]:
    return make_task(tmp_path_factory.mktemp("task"))


def grpo(task: dict[str, str], folder: Path, *more: str) -> list[str]:
    few = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "data.val_max_samples=2")
    return overrides(task, folder, *few, "trainer.save_freq=1", "trainer.test_freq=1", *more)


def fit(arguments: list[str], trainer_cls: type = RayPPOTrainer) -> RayPPOTrainer:
    trainer = make_trainer(arguments, trainer_cls=trainer_cls)
    try:
        trainer.init_workers()
        trainer.fit()
    finally:
        close(trainer)
    return trainer


@pytest.mark.slow
def test_what_a_reward_says_beside_its_score_may_be_anything_in_training_and_validation(task, tmp_path):
    """An `acc` that is no number says nothing: the score decides."""
    odd = tmp_path / "odd.py"
    odd.write_text(ODD_REWARD)
    answers = tmp_path / "answers"
    arguments = grpo(task, tmp_path, "trainer.total_training_steps=1", f"trainer.rollout_data_dir={answers}")
    trainer = fit([*arguments, f"custom_reward_function.path={odd}"])
    (row,) = trainer.history
    assert row["val/toy/accuracy"] == 1.0
    assert not any(name.startswith("training/failed") for name in row)
    assert json.loads((answers / "1.jsonl").read_text().splitlines()[0])["acc"] == [1, 2]


class FailsOnce(RayPPOTrainer):
    """Its first validation and its first save fail; notes what was saved, or being saved, when it validated."""

    failed: list[str]
    saved_before_validation: list[int | None]

    def _once(self, what: str) -> None:
        if not hasattr(self, "failed"):
            self.failed, self.saved_before_validation = [], []
        if what not in self.failed:
            self.failed.append(what)
            raise KeyError(f"broken {what}")

    def _validate(self) -> dict[str, float]:
        self._once("validation")
        self.saved_before_validation.append(self.state.saver.newest_step)
        return super()._validate()

    def _save_checkpoint(self) -> None:
        self._once("save")
        super()._save_checkpoint()


def test_a_failed_save_and_validation_are_said_counted_and_tried_again(task, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="verl"):
        trainer = fit(grpo(task, tmp_path), FailsOnce)
    first, second = trainer.history
    failures = {"training/failed_saves": 1.0, "training/failed_validations": 1.0}
    assert first | failures == first
    assert second | failures == second, "they stay visible"
    assert "val/toy/accuracy" not in first
    assert "val/toy/accuracy" in second
    assert trainer.saved_before_validation == [2]
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("global_step_*")) == ["global_step_2"]
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert [line.partition(":")[0] for line in said] == ["save of step 1 failed", "validation of step 1 failed"]
    assert "KeyError: 'broken save'" in said[0]


class NeverSaves(RayPPOTrainer):
    def _save_checkpoint(self) -> None:
        raise OSError("the store is gone")


@pytest.mark.slow
def test_a_run_whose_last_step_is_not_saved_fails_with_one_line(task, tmp_path):
    with pytest.raises(UnsavedRunError) as caught:
        fit(grpo(task, tmp_path), NeverSaves)
    assert str(caught.value) == "the run ends at step 2, which could not be saved: OSError: the store is gone"


class NeverValidates(RayPPOTrainer):
    def _validate(self) -> dict[str, float]:
        raise KeyError("broken")


@pytest.mark.slow
def test_validation_alone_fails_when_it_fails_and_before_training_it_does_not(task, tmp_path):
    with pytest.raises(KeyError):
        fit(grpo(task, tmp_path, "trainer.val_only=True"), NeverValidates)
    trained = fit(
        grpo(task, tmp_path, "trainer.val_before_train=True", "trainer.total_training_steps=1"), NeverValidates
    )
    assert [row["training/failed_validations"] for row in trained.history] == [1.0, 2.0]


class StopsWhileValidating(RayPPOTrainer):
    def _validate(self) -> dict[str, float]:
        self.stop_requested.set()
        return super()._validate()


@pytest.mark.slow
def test_asked_to_stop_while_it_validates_a_run_saves_first(task, tmp_path):
    trainer = fit(grpo(task, tmp_path, "trainer.save_freq=-1", "trainer.total_training_steps=9"), StopsWhileValidating)
    assert [row["step"] for row in trainer.history] == [1]
    assert (tmp_path / "checkpoints" / "global_step_1").is_dir()


def test_a_failed_generation_does_not_end_the_run_and_leaves_nothing_behind(task, tmp_path, monkeypatch):
    """Training needs the memory of the KV cache, and the next generation must work."""
    trainer = make_trainer(grpo(task, tmp_path, "trainer.val_before_train=False"))
    try:
        trainer.init_workers()
        trainer._sync_weights()
        worker = trainer.actor_wg.worker
        rows = DataProto.from_single_dict(next(iter(trainer.val_dataloader)))
        with monkeypatch.context() as broken:
            broken.setattr(Engine, "step", _fail)
            with pytest.raises(WorkerCallError, match="broken") as raised:
                trainer._generate_rows(rows, validate=True)
        assert not is_fatal(raised.value)
        assert worker.rollout.released == {"kv_cache"}
        assert worker.host.closed
        assert not trainer.rollouts.is_open
        assert len(trainer._generate_rows(rows, validate=True)) == len(rows)
    finally:
        close(trainer)


def _fail(engine: Any) -> Any:
    raise ValueError("broken")


def failed_call(method: str) -> WorkerCallError:
    return WorkerCallError(Failure.from_exception(KeyError("x")), "actor", 0, "host", method)


@pytest.mark.parametrize(
    "error",
    [
        WorkerDiedError("worker process died", "actor", 1, "host", "generate_sequences"),
        HangError("testing of step 2 hangs", "actor", 1, "host", "generate_sequences"),
        ConfigError([]),
        NonFiniteError("nan"),
        RewardError("reward_model.on_error is fail"),
        failed_call("compute_rm_score"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_going_on_cannot_help_ends_the_run(error):
    def act() -> None:
        try:
            raise error
        except type(error) as cause:
            raise RuntimeError("while validating") from cause

    failures = NonFatalFailures()
    with pytest.raises(RuntimeError, match="while validating"):
        failures.attempt(VALIDATION, 3, act)
    assert failures.metrics() == {}


def test_ranks_that_failed_apart_can_go_on():
    assert not is_fatal(failed_call("generate_sequences"))
    assert not is_fatal(failed_call("save_checkpoint"))


def test_a_stop_by_the_user_passes_through():
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        NonFatalFailures().attempt(SAVE, 1, interrupted)
