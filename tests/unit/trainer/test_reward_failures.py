"""A whole run whose reward function raises, hangs, dies and returns nonsense: it goes on, and says what it lost."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.support.training_harness import close, make_task, make_trainer, overrides, run_training
from verl.trainer.common.training_health import NoSamplesError
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.workers.reward_manager.naive import RewardError

REWARD = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    row = extra_info["index"] % 8
    if row == 1:
        raise RuntimeError("row 1 never works")
    if row == 2:
        time.sleep(1000)
    if row == 3:
        os._exit(1)
    if row == 4:
        return float("nan")
    score = len(set(solution_str)) / 8
    return {"score": score, "bonus": 1.0} if row == 5 else score
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    made = make_task(tmp_path_factory.mktemp("task"), rows=8)
    Path(made["reward"]).write_text(REWARD)
    return made


def test_the_run_goes_on_and_counts_what_could_not_be_scored(task, tmp_path):
    arguments = overrides(
        task,
        tmp_path,
        "algorithm=grpo",
        "actor_rollout_ref.rollout.n=2",
        "reward_model.reward_manager=dapo",
        "reward_model.overlong_buffer={enable: true, len: 4, log: true}",
        "reward_model.reward_kwargs={timeout: 1.5, num_processes: 2}",
        "data.val_files=[]",
        "trainer.total_training_steps=1",
    )
    history = run_training(arguments).history
    assert len(history) == 1
    for metrics in history:  # every prompt is in every step, twice
        assert metrics["reward/errors"] == 8
        kinds = {kind: metrics[f"reward/errors/{kind}"] for kind in ("raised", "timeout", "died", "invalid")}
        assert kinds == {"raised": 2, "timeout": 2, "died": 2, "invalid": 2}
        assert metrics["reward/bonus/mean"] == 1.0
        assert -1.0 <= metrics["reward/overlong_reward/mean"] <= 0.0
        assert math.isfinite(metrics["actor/loss"])


def test_the_run_stops_where_it_should(task, tmp_path):
    arguments = overrides(
        task, tmp_path, "reward_model.on_error=fail", "reward_model.reward_kwargs={timeout: 1.5}", "data.val_files=[]"
    )
    with pytest.raises(RewardError, match=r"\b4 of 8 samples.*1 raised, 1 timeout, 1 died, 1 invalid"):
        run_training(arguments)


OUTAGE = """
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if Path("%s").exists():
        raise ConnectionError("the judge is down")
    return len(set(solution_str)) / 8
"""


def test_a_total_outage_moves_nothing_and_stops_the_run_with_its_cause(tmp_path):
    """Actor and critic have momentum from the first step; the judge is down from the second on."""
    made, flag = make_task(tmp_path, rows=8), tmp_path / "down"
    Path(made["reward"]).write_text(OUTAGE % flag)

    class Judged(RayPPOTrainer):
        seen: list

        def _generate_and_score(self, prompts, metrics):
            if self.global_steps == 2:
                flag.touch()
            self.seen.append(state(self))
            return super()._generate_and_score(prompts, metrics)

    trainer = make_trainer(
        overrides(
            made,
            tmp_path,
            "reward_model.on_error=mask",
            "reward_model.reward_kwargs={num_processes: 1}",
            "critic.optim.lr=1e-3",
            "critic.optim.lr_warmup_steps=50",
            "algorithm.use_kl_in_reward=True",
            "algorithm.kl_ctrl.type=adaptive",
            "trainer.max_nonfinite_steps=2",
            "trainer.total_training_steps=9",
            "data.val_files=[]",
        ),
        trainer_cls=Judged,
    )
    trainer.seen = []
    try:
        trainer.init_workers()
        with pytest.raises(NoSamplesError, match=r"\b2 training steps(.|\n)*the judge is down"):
            trainer.fit()
        first, second, third = [*trainer.seen, state(trainer)][-3:]
    finally:
        close(trainer)
    assert [row.get("actor/empty_steps", 0.0) for row in trainer.history] == [0.0, 1.0, 1.0]
    assert trainer.history[0]["critic/grad_norm"] > 0
    assert "critic/grad_norm" not in trainer.history[1]
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        assert torch.equal(value, third[name]), name


@pytest.mark.slow
def test_a_total_outage_stops_dynamic_sampling_before_it_has_searched_an_epoch(tmp_path):
    made, flag = make_task(tmp_path, rows=32), tmp_path / "down"
    Path(made["reward"]).write_text(OUTAGE % flag)
    flag.touch()
    trainer = make_trainer(
        overrides(
            made,
            tmp_path,
            "algorithm.adv_estimator=grpo",
            "algorithm.filter_groups.enable=True",
            "reward_model.on_error=mask",
            "reward_model.reward_kwargs={num_processes: 1}",
            "trainer.max_nonfinite_steps=2",
            "data.val_files=[]",
        )
    )
    try:
        trainer.init_workers()
        with pytest.raises(NoSamplesError, match=r"\b2 generation batches(.|\n)*the judge is down"):
            trainer.fit()
    finally:
        close(trainer)


def state(trainer) -> dict[str, torch.Tensor]:
    """Weights, schedules and versions of all that learns."""
    found = {"version": torch.tensor(trainer.policy_version), "kl": torch.tensor(trainer.kl_ctrl_in_reward.value)}
    for group in (trainer.actor_wg, trainer.critic_wg):
        engine = group.worker.engine
        found[f"{group.role}/schedule"] = torch.tensor(engine.optimizer.schedule.last_epoch)
        for bucket in engine.buckets(None, 1 << 30):
            found |= {f"{group.role}/{name}": value.clone() for name, value in bucket.items()}
    return found
