"""Ranks without training state die; the weights are bit-identical to those of an undisturbed run."""

from __future__ import annotations

import os
import signal
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

from tests.support.fragile_ranks import EngineProcessWorker, FragileWorker, arm
from tests.support.training_harness import make_task, overrides, run_training
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.asynchronous.trainer import AsyncPPOTrainer
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.utils import Role

STEPS = 2
LAYOUT = (
    "resource_pool_spec={train: [1], generate: [2], compare: [1]}",
    "role_mapping={actor: train, ref: compare, rollout: generate}",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=2",
    f"trainer.total_training_steps={STEPS}",
    f"trainer.save_freq={STEPS}",
)
WITH_REFERENCE = ("actor_rollout_ref.actor.use_kl_loss=True", "trainer.test_freq=1")


class Fragile(RayPPOTrainer):
    """Ranks of rollout and reference die once at each point in `deaths` (step: points)."""

    deaths: ClassVar[dict[int, tuple[str, ...]]] = {}

    worker: ClassVar[type] = FragileWorker

    def __init__(self, config: Any, tokenizer: Any, workers: dict[Role, type], *args: Any, **kwargs: Any) -> None:
        workers = {role: cls if role is Role.Actor else self.worker for role, cls in workers.items()}
        super().__init__(config, tokenizer, workers, *args, **kwargs)

    def _train_step(self, batch: Any) -> dict[str, float]:
        for point in set(self.deaths.get(self.global_steps, ())) - {"idle", "validate"}:
            self._arm(point)
        return super()._train_step(batch)

    def _compute_reward(self, batch: Any, metrics: dict[str, float] | None = None) -> Any:
        if "idle" in self.deaths.get(self.global_steps, ()):
            os.kill(self.rollout_wg.pid()[0], signal.SIGKILL)  # a rank that has already returned its responses
        return super()._compute_reward(batch, metrics)

    def _validate(self) -> dict[str, float]:
        if "validate" in self.deaths.get(self.global_steps, ()):
            self._arm("generate")
        return super()._validate()

    def _arm(self, point: str) -> None:
        arm(self.config.actor_rollout_ref.model.path, point)


class Disturbed(Fragile):
    deaths: ClassVar = {1: ("generate",), 2: ("receive", "idle")}


class DisturbedEngines(Disturbed):
    worker: ClassVar = EngineProcessWorker


class Stream(Fragile, AsyncPPOTrainer):
    """Generates during the update; `pids`: the processes of its replicas per step."""

    pids: ClassVar[list[list[int]]] = []

    def _train_step(self, batch: Any) -> dict[str, float]:
        metrics = super()._train_step(batch)
        self.pids.append(self.rollout_wg.pid())
        return metrics


class DisturbedStream(Stream):
    deaths: ClassVar = {1: ("receive",), 2: ("answer",)}
    pids: ClassVar[list[list[int]]] = []


class DisturbedMore(Fragile):
    deaths: ClassVar = {1: ("end", "reference", "validate"), 2: ("generate", "start")}


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict[str, str]:
    return make_task(tmp_path_factory.mktemp("task"))


def run(task: dict[str, str], folder: Any, cls: type, *more: str) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """The metrics of a run and the weights at its end."""
    history = run_training(overrides(task, folder, *LAYOUT, *more), RayWorkerGroup, cls).history
    saved = f"checkpoints/global_step_{STEPS}/actor/huggingface/*.safetensors"
    return history, load_file(next(folder.glob(saved)))


def assert_equal_weights(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
def test_a_rollout_rank_killed_in_generation_hand_over_and_idle_changes_no_bit(task, tmp_path, ray_cluster, caplog):
    undisturbed, expected = run(task, tmp_path / "undisturbed", Fragile)
    disturbed, weights = run(task, tmp_path / "disturbed", Disturbed)
    assert_equal_weights(weights, expected)
    assert [row.get("training/generation_restarts") for row in undisturbed] == [None, None]
    # The answers of the one that died idle outlive it; the validation after the last step misses it.
    assert [row["training/generation_restarts"] for row in disturbed] == [1, 3]
    restarts = [record.message for record in caplog.records if "Its group is restarted" in record.message]
    assert "step 1: rollout rank" in restarts[0]
    assert "was lost in raise_engine_error" in restarts[0]
    assert "was lost in receive_weights" in restarts[1]


@pytest.mark.slow
def test_a_replica_of_a_stream_dies_alone_and_changes_no_bit(task, tmp_path, ray_cluster):
    _, expected = run(task, tmp_path / "undisturbed", Fragile)
    stream = ("trainer.mode=async", "trainer.max_staleness=0")
    disturbed, weights = run(task, tmp_path / "disturbed", DisturbedStream, *stream)
    assert_equal_weights(weights, expected)
    assert [row["training/generation_restarts"] for row in disturbed] == [1, 2]
    before, after = DisturbedStream.pids
    assert sum(one == other for one, other in zip(before, after, strict=True)) == 1, "the other one lives"


@pytest.mark.slow
def test_an_engine_that_dies_beside_its_rank_changes_no_bit(task, tmp_path, ray_cluster, caplog):
    _, expected = run(task, tmp_path / "undisturbed", Fragile)
    disturbed, weights = run(task, tmp_path / "disturbed", DisturbedEngines)
    assert_equal_weights(weights, expected)
    assert [row["training/generation_restarts"] for row in disturbed] == [1, 3]
    restarts = [record.message for record in caplog.records if "Its engine is restarted" in record.message]
    assert "step 1: rollout rank" in restarts[0]
    assert len(restarts) == 3


@pytest.mark.slow
def test_deaths_in_reference_validation_and_restart_change_no_bit_either(task, tmp_path, ray_cluster):
    _, expected = run(task, tmp_path / "undisturbed", Fragile, *WITH_REFERENCE)
    disturbed, weights = run(task, tmp_path / "disturbed", DisturbedMore, *WITH_REFERENCE)
    assert_equal_weights(weights, expected)
    assert disturbed[-1]["training/reference_restarts"] == 1
    assert disturbed[-1]["training/generation_restarts"] == 4
