"""Where old log-probs come from: the update itself where nobody reads them before it and nothing has moved yet."""

from __future__ import annotations

import pytest

from verl.config import ConfigError, load_config
from verl.config.layout import old_log_probs_from_update

GIVEN = ("data.train_files=openai/gsm8k", "actor_rollout_ref.model.path=a/b", "trainer.n_gpus_per_node=1")
ACTOR = "actor_rollout_ref.actor"
ONE_STEP = ("data.train_batch_size=32", f"{ACTOR}.ppo_mini_batch_size=32", "algorithm=grpo")
KEY = f"{ACTOR}.old_log_prob_from_update"


def load(*overrides: str):
    return load_config(None, [*GIVEN, *ONE_STEP, *overrides], check_files=False)


@pytest.mark.parametrize("loss", ["vanilla", "gspo", "cispo"])
def test_one_optimizer_step_per_batch_takes_them_from_the_update(loss):
    assert old_log_probs_from_update(load(f"{ACTOR}.policy_loss.loss_mode={loss}"))
    assert old_log_probs_from_update(load(f"{ACTOR}.use_kl_loss=True")), "that KL is inside the update"
    assert not old_log_probs_from_update(load(f"{KEY}=False"))


WEIGHTS = "algorithm.rollout_correction.rollout_is"


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_are_computed_by_the_update_unless_their_mean_is_needed(level):
    assert old_log_probs_from_update(load(f"{WEIGHTS}={level}"))
    assert not old_log_probs_from_update(load(f"{WEIGHTS}={level}", f"{WEIGHTS}_batch_normalize=True"))


def test_asynchronous_runs_need_no_separate_pass():
    config = load("trainer.mode=async", "trainer.max_staleness=2")
    assert config.algorithm.rollout_correction.rollout_is == "token"
    assert old_log_probs_from_update(config)
    assert load("trainer.mode=async", f"{KEY}=True").algorithm.rollout_correction.rollout_is == "token"


@pytest.mark.parametrize(
    ("override", "why"),
    [
        (f"{ACTOR}.ppo_mini_batch_size=16", "take 2 optimizer steps per batch"),
        (f"{ACTOR}.ppo_epochs=3", "take 3 optimizer steps per batch"),
        ("algorithm.use_kl_in_reward=True", "algorithm.use_kl_in_reward = True reads them"),
        ("algorithm.rollout_correction.rollout_rs=sequence", "rollout_correction.rollout_rs = sequence masks tokens"),
        ("algorithm.rollout_correction.bypass_mode=True", "uses the rollout's"),
    ],
)
def test_what_speaks_against_it_means_a_pass_of_their_own_and_is_named_when_it_was_asked_for(override, why):
    assert not old_log_probs_from_update(load(override))
    with pytest.raises(ConfigError) as caught:
        load(override, f"{KEY}=True")
    (problem,) = caught.value.problems
    assert problem.key == KEY
    assert why in problem.why
