"""Every estimator and policy loss trains on the quick start's task; four algorithms learn it (slow)."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tests.support.quickstart_task import make_quickstart, overrides
from tests.support.training_harness import run_training
from verl.config import names

SHORT = ("data.val_files=[]", "trainer.total_training_steps=1")
ALWAYS = {
    "reward/mean",
    "reward/format/mean",
    "critic/advantages/max",
    "critic/returns/mean",
    "response_length/mean",
    "actor/loss",
    "actor/policy_loss",
    "actor/pg_loss",
    "actor/approx_kl",
    "actor/ppo_ratio",
    "actor/entropy",
    "actor/grad_norm",
    "rollout_corr/kl",
    "rollout_corr/ratio_p99",
    "rollout_corr/masked_fraction",
    "timing_s/gen",
    "timing_s/update_actor",
    "perf/throughput",
}
EXTRA = {
    "gae": (["critic.optim.lr=1e-3"], {"critic/loss", "critic/values/mean", "critic/vf_explained_var"}),
    "remax": ([], {"reward/greedy/mean"}),
    "gdpo": (["algorithm.gdpo.reward_keys=[score,format]"], set()),
}
LOSS_METRICS = {
    "vanilla": {"actor/clipfrac", "actor/clipfrac_lower"},
    "gspo": {"actor/sequence_ratio"},
    "clip_cov": {"actor/clip_cov_fraction"},
    "kl_cov": {"actor/kl_cov_fraction"},
    "geo_mean": {"actor/sequence_ratio"},
}


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict[str, str]:
    return make_quickstart(tmp_path_factory.mktemp("quickstart"))


def assert_it_trained(trainer, task: dict[str, str], expected: set[str]) -> None:
    from transformers import AutoModelForCausalLM

    assert len(trainer.history) == 1
    for row in trainer.history:
        assert expected <= row.keys(), sorted(expected - row.keys())
        assert all(math.isfinite(value) for value in row.values()), row
        assert row["actor/grad_norm"] > 0
        assert row["actor/skipped_steps"] == 0
    before = AutoModelForCausalLM.from_pretrained(task["model"]).state_dict()
    after = trainer.final_weights
    assert any(not torch.equal(before[name], value) for name, value in after.items())
    assert all(torch.isfinite(value).all() for value in after.values())


PAIRS = list(itertools.zip_longest(names.ADV_ESTIMATORS, reversed(names.POLICY_LOSSES)))


@pytest.mark.parametrize(("estimator", "loss"), PAIRS)
def test_every_estimator_and_every_policy_loss_trains(task, tmp_path, estimator, loss):
    more, expected = EXTRA.get(estimator, ([], set()))
    keys = (
        f"algorithm.adv_estimator={estimator or 'grpo'}",
        f"actor_rollout_ref.actor.policy_loss.loss_mode={loss or 'vanilla'}",
        "actor_rollout_ref.rollout.n=4",
    )
    trainer = run_training(overrides(task, tmp_path, *keys, *SHORT, *more))
    assert_it_trained(trainer, task, ALWAYS | expected | LOSS_METRICS.get(loss or "vanilla", set()))


# ---------------------------------------------------------------- learning

LEARNING = {
    "grpo": ("algorithm=grpo",),
    "rloo": ("algorithm=grpo", "algorithm.adv_estimator=rloo"),
    "reinforce_plus_plus": ("algorithm=grpo", "algorithm.adv_estimator=reinforce_plus_plus"),
    "dapo": (
        "algorithm=grpo",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=acc",
        "actor_rollout_ref.actor.clip_ratio_low=0.2",
        "actor_rollout_ref.actor.clip_ratio_high=0.28",
        "actor_rollout_ref.actor.loss_agg_mode=token-mean",
    ),
}


@pytest.fixture(scope="module")
def learnable(tmp_path_factory) -> dict[str, str]:
    """A better warm start: the answers have their form, and most losses are added as the teacher did."""
    return make_quickstart(tmp_path_factory.mktemp("learnable"), steps=400, train=4096, val=128)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", LEARNING)
def test_the_accuracy_on_new_problems_rises_clearly(learnable, tmp_path, name):
    run = overrides(
        learnable,
        tmp_path,
        *LEARNING[name],
        "data.train_batch_size=64",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=128",
        "trainer.total_training_steps=60",
        "trainer.val_before_train=True",
    )
    history = run_training(run).history
    before, after = (row["val/openai/gsm8k/accuracy"] for row in (history[0], history[-1]))
    assert before < 0.5
    assert after > before + 0.25, (before, after)
    rewards = [row["reward/acc/mean"] for row in history[1:]]  # of all answers, those of dropped groups too
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.15, rewards
