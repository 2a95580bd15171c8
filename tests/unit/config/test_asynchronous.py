"""Asynchronous training's keys: what the modes mean, and what other versions' scripts say instead."""

from __future__ import annotations

import runpy
import sys

import pytest

from verl.config import ConfigError, load_config
from verl.config.asynchronous import Ahead, ahead_of

ROLLOUT = "actor_rollout_ref.rollout"
RUN = ["data.train_files=openai/gsm8k", "actor_rollout_ref.model.path=org/model"]


def load(*overrides: str):
    return load_config(None, [*RUN, *overrides], check_files=False)


def test_the_modes_are_one_mechanism():
    assert ahead_of(load("trainer.mode=one_step_off").trainer) == Ahead(1, "wait", in_order=True, partial=False)
    assert ahead_of(load("trainer.mode=async").trainer) == Ahead(1, "wait", in_order=False, partial=True)
    assert ahead_of(load("trainer.mode=async", "trainer.max_staleness=0").trainer).in_order
    config = load("trainer.mode=async")
    assert config.actor_rollout_ref.rollout.mode == "async"
    assert any("rollout.mode is async" in notice for notice in config.notices)


def test_loop_workers_that_are_too_few_for_the_pool_are_said():
    """Four of 128 answers each, by default; a replica decodes 1,024."""
    pool = ("trainer.mode=async", "data.train_batch_size=512", f"{ROLLOUT}.n=8")
    pool += (f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=8")
    (said,) = [notice for notice in load(*pool).notices if "loop workers keep" in notice]
    assert "keep 512 answers going, of 8192 that" in said
    assert "Set it to 2048" in said
    enough = (*pool, f"{ROLLOUT}.agent.max_concurrent_requests=2048")
    for fine in (enough, (*pool, "trainer.mode=sync"), (*pool, "data.train_batch_size=128", f"{ROLLOUT}.n=4")):
        assert not any("loop workers keep" in notice for notice in load(*fine).notices)


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
    for unread in ("staleness_threshold", "require_batches"):
        with pytest.raises(ConfigError, match=r"async_training.*cannot be read.*Set trainer\.mode"):
            load(f"async_training.{unread}=some")
    with pytest.raises(ConfigError, match=r"rollout\.total_rollout_steps = 100: a step takes more .*Set it to 512"):
        load("rollout.total_rollout_steps=100")


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
