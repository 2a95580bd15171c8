"""Asynchronous training's keys: what the modes mean, and what other versions' scripts say instead."""

from __future__ import annotations

import re
import runpy
import sys

import pytest

from verl.config import ConfigError, load_config
from verl.config.layout import AsyncSettings, async_settings

ROLLOUT = "actor_rollout_ref.rollout"
RUN = ["data.train_files=openai/gsm8k", "actor_rollout_ref.model.path=org/model"]


def load(*overrides: str):
    return load_config(None, [*RUN, *overrides], check_files=False)


def test_the_modes_are_one_mechanism():
    assert async_settings(load("trainer.mode=one_step_off").trainer) == AsyncSettings(
        1, "wait", in_order=True, partial_rollout=False
    )
    assert async_settings(load("trainer.mode=async").trainer) == AsyncSettings(
        1, "wait", in_order=False, partial_rollout=True
    )
    assert async_settings(load("trainer.mode=async", "trainer.max_staleness=0").trainer).in_order
    config = load("trainer.mode=async")
    assert config.actor_rollout_ref.rollout.mode == "async"
    assert any("rollout.mode is set to async" in notice for notice in config.notices)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), 512),  # 2 x 1,024 sequences of one replica, over 4 workers
        (("agent.num_workers=1",), 2048),
        (("agent.num_workers=3",), 683),
        (("max_num_seqs=16",), 128),
        (("nnodes=2", "n_gpus_per_node=8"), 8192),
        (("nnodes=2", "n_gpus_per_node=8", "tensor_model_parallel_size=4"), 2048),
        (("agent.max_concurrent_requests=7",), 7),
    ],
)
def test_agents_fill_the_engines_by_default_and_an_explicit_number_is_kept(overrides, expected):
    config = load("trainer.mode=async", *(f"{ROLLOUT}.{override}" for override in overrides))
    assert config.actor_rollout_ref.rollout.agent.max_concurrent_requests == expected
    assert config.to_dict()["actor_rollout_ref"]["rollout"]["agent"]["max_concurrent_requests"] == expected


@pytest.mark.parametrize("wrong", ["num_workers=0", "max_concurrent_requests=0"])
def test_fewer_than_one_loop_worker_or_conversation_is_refused(wrong):
    with pytest.raises(ConfigError, match=f"agent.{wrong.replace('=', ' = ')}"):
        load("trainer.mode=async", f"{ROLLOUT}.agent.{wrong}")


def test_an_explicit_number_far_below_the_engines_capacity_is_reported_for_agents_only():
    pool = ("trainer.mode=async", "data.train_batch_size=512", f"{ROLLOUT}.n=8", f"{ROLLOUT}.nnodes=1")
    pool += (f"{ROLLOUT}.n_gpus_per_node=8", f"{ROLLOUT}.mode=async", f"{ROLLOUT}.multi_turn.enable=True")
    low = f"{ROLLOUT}.agent.max_concurrent_requests=128"

    def notices(*overrides):
        return [notice for notice in load(*pool, *overrides).notices if "max_concurrent_requests" in notice]

    (notice,) = notices(low)
    assert {"128", "512", "8192"} <= set(re.findall(r"\d+", notice))
    small = ("data.train_batch_size=128", f"{ROLLOUT}.n=4")
    for fine in ((), (f"{ROLLOUT}.agent.max_concurrent_requests=2048",), (low, "trainer.mode=sync"), (low, *small)):
        assert not notices(*fine)
    assert not notices(low, f"{ROLLOUT}.multi_turn.enable=False")  # single-turn rows do not run in loop workers


def test_scripts_of_other_versions_mean_the_same():
    config = load(
        "trainer.mode=async",
        "data.train_batch_size=0",
        "data.gen_batch_size=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "async_training.staleness_threshold=0.5",
        "async_training.trigger_parameter_sync_step=4",
        "async_training.require_batches=2",
        "async_training.partial_rollout=False",
        "async_training.use_trainer_do_validate=True",
        "rollout.nnodes=2",
        "rollout.n_gpus_per_node=4",
        "rollout.total_rollout_steps=51200",
        "rollout.test_freq=10",
    )
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    assert (trainer.max_staleness, trainer.partial_rollout, trainer.test_freq) == (1, False, 10)
    assert (config.data.train_batch_size, config.data.gen_batch_size, trainer.total_training_steps) == (256, 256, 200)
    assert (rollout.nnodes, rollout.n_gpus_per_node) == (2, 4)
    newer = load(
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=4",
        "trainer.v1.sampler.max_off_policy_threshold=8",
        "trainer.v1.sampler.max_off_policy_strategy=drop",
    )
    assert (newer.trainer.mode, newer.trainer.max_staleness, newer.trainer.staleness_strategy) == ("async", 8, "drop")
    modes = {mode: load(f"trainer.v1.trainer_mode={mode}").trainer.mode for mode in ("sync", "colocate_async")}
    assert modes == {"sync": "sync", "colocate_async": "async"}
    assert load("data.train_batch_size=0", "async_training.staleness_threshold=1").data.train_batch_size == 128


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("async_training.staleness_threshold", "some"),
        ("async_training.staleness_threshold", "inf"),
        ("async_training.require_batches", "some"),
        ("async_training", "5"),
        ("rollout", "3"),
        ("rollout.total_rollout_steps", "some"),
        ("rollout.total_rollout_steps", "100"),
    ],
)
def test_a_value_that_cannot_be_converted_is_reported_under_its_key(key: str, value: str):
    with pytest.raises(ConfigError) as error:
        load(f"{key}={value}")
    assert [problem.key for problem in error.value.problems] == [key]


@pytest.mark.parametrize("key", ["data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"])
def test_a_number_needed_for_a_conversion_is_reported_once(key: str):
    with pytest.raises(ConfigError) as error:
        load(f"{key}=some", "rollout.total_rollout_steps=102400")
    assert [problem.key for problem in error.value.problems] == [key]


@pytest.mark.parametrize("key", ["data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"])
def test_a_batch_size_given_by_an_interpolation_does_not_prevent_conversions(key: str):
    config = load(
        f"{key}=${{data.max_prompt_length}}",
        "data.max_prompt_length=256",
        "async_training.staleness_threshold=0.5",
        "rollout.total_rollout_steps=${oc.decode:'64000'}",
    )
    trainer = config.trainer
    assert (trainer.max_staleness, trainer.total_training_steps) == (1, 64000 // config.data.train_batch_size)
    batch_size = config.data.train_batch_size
    assert batch_size == (256 if key.startswith("data.") else load().data.train_batch_size)


def test_an_interpolated_block_is_resolved_and_null_counts_as_not_set():
    mine = {"train_files": ["a.parquet"], "train_batch_size": 128}
    config = load_config(
        {
            "data": "${actor_rollout_ref.model.override_config.mine}",
            "actor_rollout_ref": {"model": {"path": "org/model", "override_config": {"mine": mine}}},
            "rollout": {"total_rollout_steps": 256},
        },
        check_files=False,
    )
    assert config.trainer.total_training_steps == 2
    unset = load("async_training.staleness_threshold=${data.val_batch_size}", "trainer.mode=async")
    assert unset.trainer.max_staleness == load("trainer.mode=async").trainer.max_staleness


def test_an_invalid_batch_size_does_not_hide_other_problems():
    with pytest.raises(ConfigError) as error:
        load("data.train_batch_size=some", "async_training.staleness_threshold=inf", "rollout.total_rollout_steps=1.5")
    keys = {"data.train_batch_size", "async_training.staleness_threshold", "rollout.total_rollout_steps"}
    assert {problem.key for problem in error.value.problems} == keys


@pytest.mark.parametrize("key", ["async_training.staleness_threshold", "async_training.require_batches"])
def test_an_interpolation_that_cannot_be_resolved_is_reported_once(key: str):
    with pytest.raises(ConfigError) as error:
        load(f"{key}=${{nothing.here}}")
    assert [problem.key for problem in error.value.problems] == [key]


@pytest.mark.parametrize(
    ("module", "mode"),
    [("fully_async_policy.fully_async_main", "async"), ("one_step_off_policy.main_ppo", "one_step_off")],
)
def test_commands_of_other_versions_set_the_mode(module: str, mode: str, monkeypatch: pytest.MonkeyPatch):
    typed = ["--config-path=config", "--config-name='fully_async_ppo_megatron_trainer.yaml'", "trainer.nnodes=2"]
    monkeypatch.setattr("sys.argv", ["face", *typed])
    monkeypatch.setattr("verl.trainer.main_ppo.main", lambda: None)
    runpy.run_module(f"verl.experimental.{module}", run_name="__main__")
    assert sys.argv[1:] == [f"trainer.mode={mode}", "--config-name=ppo_megatron_trainer", "trainer.nnodes=2"]
