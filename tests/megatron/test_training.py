"""Whole runs with the Megatron engine: the results of FSDP's, and a reward that rises."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.training_harness import STEADY, make_task, overrides, run_training
from verl.single_controller.ray import RayWorkerGroup

pytestmark = pytest.mark.timeout(1800)
ACTOR = "actor_rollout_ref.actor"
SAME = ("reward/mean", "actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm", "kl/mean", "actor/entropy")
# The actor on TP2 x PP2, its critic on TP2 x DP2.
MEGATRON = (
    f"{ACTOR}.strategy=megatron",
    f"{ACTOR}.megatron_config.tensor_model_parallel_size=2",
    f"{ACTOR}.megatron_config.pipeline_model_parallel_size=2",
    "trainer.n_gpus_per_node=4",
)
CRITIC = ("critic.strategy=megatron", "critic.megatron_config.tensor_model_parallel_size=2")
GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_task(tmp_path_factory.mktemp("task"))


def ppo(task: dict[str, str], folder: Path, *more: str) -> list[str]:
    return overrides(task, folder, *STEADY, f"{ACTOR}.use_kl_loss=True", "data.val_files=[]", *more)


def test_one_rank_gives_the_run_of_fsdp(task, tmp_path):
    fsdp = run_training(ppo(task, tmp_path / "fsdp"))
    ours = run_training(ppo(task, tmp_path / "ours", f"{ACTOR}.strategy=megatron", "critic.strategy=megatron"))
    assert_same_run(ours.history, fsdp.history)


def test_actor_and_critic_of_different_layouts_give_the_run_of_fsdp(task, tmp_path, ray_cluster):
    fsdp = run_training(ppo(task, tmp_path / "fsdp", "trainer.total_training_steps=3"))
    for name, critic in (("megatron", CRITIC), ("fsdp critic", ())):
        run = ppo(task, tmp_path / name, *MEGATRON, *critic, "trainer.total_training_steps=3")
        assert_same_run(run_training(run, RayWorkerGroup).history, fsdp.history)


@pytest.mark.parametrize("algorithm", [GRPO, CRITIC], ids=["grpo", "ppo"])
def test_the_reward_rises(task, tmp_path, ray_cluster, algorithm):
    steps = ("trainer.total_training_steps=25", f"{ACTOR}.optim.lr=3e-3", "data.val_files=[]")
    trainer = run_training(overrides(task, tmp_path, *MEGATRON, *algorithm, *steps), RayWorkerGroup)
    rewards = [row["reward/mean"] for row in trainer.history]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15, rewards


def assert_same_run(one: list[dict], other: list[dict]) -> None:
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        for name in SAME:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), (mine["step"], name)
