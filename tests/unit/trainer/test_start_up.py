"""Before anything is loaded: what is not built is refused, and what took the time is said at the end."""

from __future__ import annotations

import pytest

from verl.config import ConfigError, load_config, names
from verl.trainer.ppo.phases import verdict
from verl.trainer.ppo.unbuilt import refuse_unbuilt

BASE = ["data.train_files=x.parquet", "actor_rollout_ref.model.path=org/model", "trainer.n_gpus_per_node=2"]


def config(*overrides: str):
    return load_config(None, [*BASE, *overrides], check_files=False)


def test_everything_that_is_not_built_is_refused_at_once():
    asked = config(
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.name=hf",
        "algorithm.adv_estimator=grpo",
    )
    with pytest.raises(ConfigError) as caught:
        refuse_unbuilt(asked)
    assert [problem.key for problem in caught.value.problems] == [
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
    ]


def test_a_plain_run_is_not_refused():
    refuse_unbuilt(config())
    refuse_unbuilt(config("algorithm.adv_estimator=grpo", "algorithm.filter_groups.enable=True"))
    refuse_unbuilt(config("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"))
    refuse_unbuilt(config("actor_rollout_ref.model.lora_rank=8", "critic.model.lora_rank=8"))
    for estimator in names.ADV_ESTIMATORS:
        refuse_unbuilt(config(f"algorithm.adv_estimator={estimator}"))


def test_the_verdict_names_the_phase_and_a_key_that_helps():
    text = verdict({"gen": 6.0, "update_actor": 3.0, "step": 9.5, "reward": 1.0})
    assert text.startswith("gen took 60% of the time")
    assert "actor_rollout_ref.rollout.name" in text
