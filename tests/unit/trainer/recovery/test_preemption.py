"""A signal that leaves so many seconds: what is given up then, and that the run goes on as if it had not been."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training_harness import make_task, overrides, run_training
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.recovery.step_end import GivenUpError, Preemption, fits, remaining_seconds
from verl.utils.checkpoint.checkpoint_manager import CheckpointManager
from verl.utils.checkpoint.manifest import read_manifest

KL = "actor/reward_kl_penalty_coeff"
USUAL = {"update_weights": 1.0, "gen": 30.0, "reward": 2.0, "update_actor": 10.0, "step": 43.0, "save_checkpoint": 9.0}


@pytest.mark.parametrize(
    ("usual", "elapsed", "phase", "rest"),
    [
        ({}, {"gen": 3.0}, "gen", None),
        (USUAL, {}, "step", 43.0),
        (USUAL, {"update_weights": 1.0, "gen": 12.0, "step": 13.0}, "gen", 30.0),
        (USUAL, {"update_weights": 1.0, "gen": 50.0, "step": 51.0}, "gen", 12.0),
        (USUAL, {"update_weights": 1.0, "gen": 30.0, "reward": 2.5, "step": 33.5}, "reward", 10.0),
        (USUAL, {"testing": 4.0}, "testing", None),
        ({**USUAL, "testing": 20.0}, {"testing": 4.0, "step": 43.0}, "testing", 16.0),
        ({**USUAL, "testing": 20.0}, {"update_weights": 1.0}, "gen", 42.0),
    ],
)
def test_what_the_rest_takes_follows_from_the_usual_times(usual, elapsed, phase, rest):
    assert remaining_seconds(usual, elapsed, phase) == rest


@pytest.mark.parametrize(
    ("within", "rest", "save", "there_is_time"),
    [
        (60.0, 40.0, 10.0, True),
        (60.0, 40.0, 20.0, True),
        (60.0, 40.0, 21.0, False),
        (60.0, None, 0.0, False),
        (60.0, 30.0, None, True),
        (60.0, 31.0, None, False),
        (0.5, 0.0, 0.4, True),
    ],
)
def test_there_is_time_for_what_fits_with_a_save(within, rest, save, there_is_time):
    assert fits(within, rest, save) is there_is_time


class Clock:
    """The phases of a step, at a moment."""

    def __init__(self, **elapsed: float) -> None:
        self.seconds = elapsed

    def elapsed(self) -> dict[str, float]:
        return self.seconds


def preemption(within: float | None = 30.0) -> Preemption:
    """After a complete step with the usual times."""
    found = Preemption(within)
    found.begin_step(1, Clock(**USUAL))
    found.end_step(1)
    return found


def test_a_step_is_given_up_in_words_and_enters_no_further_phase():
    run = preemption()
    run.begin_step(2, Clock(update_weights=1.0, gen=12.0, step=13.0))
    run.enter_phase("gen")
    assert run.decide("SIGTERM", save=5.0)
    assert run.given_up == ("SIGTERM: step 2 given up after 13 s (it needs about 30 s more, trainer.save_within=30)")
    with pytest.raises(GivenUpError):
        run.enter_phase("update_actor")
    run.enter_phase("save_checkpoint")
    assert not run.decide("SIGTERM", save=5.0), "once"


@pytest.mark.parametrize("phase", ["update_critic", "update_actor", "save_checkpoint", "a_phase_of_the_users"])
def test_what_may_have_changed_the_weights_is_finished(phase):
    run = preemption()
    run.begin_step(2, Clock())
    run.enter_phase("gen")
    run.enter_phase(phase)
    assert not run.decide("SIGTERM", save=5.0)
    run.enter_phase("gen")
    assert not run.decide("SIGTERM", save=5.0), "nor what the same step does after it"
    run.end_step(2)
    assert run.decide("SIGTERM", save=5.0)
    assert run.given_up.startswith("SIGTERM: step 3 given up after 0 s")


def test_without_a_budget_nothing_is_given_up():
    assert not preemption(within=None).decide("SIGTERM", save=5.0)


# ---------------------------------------------------------------- whole runs


class PreemptedInGeneration(RayPPOTrainer):
    """The signal comes during a generation that never ends: the engine is paused."""

    at = (2, False)

    def _generate_rows(self, batch: Any, validate: bool) -> Any:
        if (self.global_steps, validate) == self.at:
            worker = self.actor_wg.worker
            worker.rollout.pause_generation("keep")
            threading.Thread(target=self._signal).start()
        return super()._generate_rows(batch, validate)

    def _signal(self) -> None:
        while not any(job.rows for job in self.rollouts.jobs.values()):
            time.sleep(0.001)
        self.preempt("SIGTERM")


class PreemptedInReward(RayPPOTrainer):
    """The reward function hangs; the signal comes then."""

    def _compute_reward(self, batch: Any, metrics: Any = None) -> Any:
        threading.Thread(target=self.preempt, args=["SIGTERM"]).start()
        return super()._compute_reward(batch, metrics)


class PreemptedInAdvantages(RayPPOTrainer):
    """After them the KL controller has moved and the prompts of step 3 are taken."""

    def _compute_advantage(self, batch: Any, metrics: Any = None) -> Any:
        found = super()._compute_advantage(batch, metrics)
        if self.global_steps == 3:
            self.preempt("SIGUSR1")
        return found


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict[str, str]:
    return make_task(tmp_path_factory.mktemp("task"))


def command(task: dict[str, str], folder: Path, *more: str) -> list[str]:
    kl = ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", "actor_rollout_ref.rollout.n=2")
    few = ("algorithm.adv_estimator=grpo", "data.val_files=[]", "trainer.total_training_steps=3", "data.shuffle=True")
    return overrides(task, folder, *few, *kl, "trainer.save_within=30", *more)


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_given_up_and_the_resumed_run_equals_an_uninterrupted_one(task, tmp_path, caplog):
    hurried = command(task, tmp_path / "a", "trainer.save_within=0.001")
    with caplog.at_level(logging.WARNING, logger="verl"):
        stopped = run_training(hurried, trainer_cls=PreemptedInGeneration)
    assert [row["step"] for row in stopped.history] == [1]
    root = tmp_path / "a" / "checkpoints"
    assert [path.name for path in root.glob("global_step_*")] == ["global_step_1"]
    assert CheckpointManager.verify(root / "global_step_1") == []
    said = caplog.messages[-1]
    assert said.startswith("SIGTERM: step 2 given up after ")
    assert said.endswith(f"trainer.save_within=0.001); step 1 is saved in {root}")
    again = run_training([*hurried, "trainer.save_freq=1"], trainer_cls=PreemptedInAdvantages)
    assert [row["step"] for row in again.history] == [2]
    assert read_manifest(root / "global_step_2").serial == 2, "it was saved already, and is not once more"
    resumed = run_training(command(task, tmp_path / "a"))
    assert [row["step"] for row in resumed.history] == [3]
    whole = run_training(command(task, tmp_path / "b"))
    assert all(torch.equal(resumed.final_weights[name], value) for name, value in whole.final_weights.items())
    assert resumed.history[-1][KL] == whole.history[-1][KL]


class PreemptedInValidation(PreemptedInGeneration):
    at = (1, True)


@pytest.mark.slow
def test_a_validation_that_does_not_fit_is_given_up_and_its_step_saved(task, tmp_path, caplog):
    hurried = command(
        task, tmp_path, "trainer.save_within=0.001", f"data.val_files={task['val']}", "trainer.test_freq=1"
    )
    with caplog.at_level(logging.WARNING, logger="verl"):
        stopped = run_training(hurried, trainer_cls=PreemptedInValidation)
    (row,) = stopped.history
    assert "training/failed_validations" not in row
    assert "SIGTERM: validation of step 1 given up after " in caplog.text
    assert CheckpointManager.verify(tmp_path / "checkpoints" / "global_step_1") == []


HANGS = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(600)
"""


def test_scoring_that_does_not_fit_is_given_up_and_before_the_first_step_there_is_nothing_to_save(
    task, tmp_path, caplog
):
    slow = tmp_path / "slow.py"
    slow.write_text(HANGS)
    keys = ("reward_model.overlap=False", "reward_model.reward_kwargs.num_processes=2")
    with caplog.at_level(logging.WARNING, logger="verl"):
        stopped = run_training(
            command(task, tmp_path, f"custom_reward_function.path={slow}", *keys), trainer_cls=PreemptedInReward
        )
    assert stopped.history == []
    assert caplog.messages[-1].startswith("SIGTERM: step 1 given up after ")
    assert caplog.messages[-1].endswith("; no step was complete, so nothing is saved")
    assert list((tmp_path / "checkpoints").glob("*step*")) == []
