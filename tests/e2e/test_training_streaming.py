"""Asynchronous training on Ray, generation on devices of its own: a loop worker and a replica die under the stream."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.trained_prompts import Notes
from tests.support.training_harness import make_task, overrides, run_training
from verl.protocol import DataProto
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.asynchronous.trainer import AsyncPPOTrainer

ROLLOUT = "actor_rollout_ref.rollout"
RUN = (
    "resource_pool_spec={train: [1], generate: [2]}",
    "role_mapping={actor: train, rollout: generate}",
    "algorithm.adv_estimator=grpo",
    f"{ROLLOUT}.n=2",
    f"{ROLLOUT}.agent.num_workers=2",
    "data.max_response_length=24",
    "trainer.total_training_steps=4",
    "trainer.max_staleness=2",
)


class Killing(Notes, AsyncPPOTrainer):
    def _after_step(self, batch: DataProto, metrics: dict[str, float]) -> None:
        super()._after_step(batch, metrics)
        victims = {1: self.groups.agents, 2: self.groups.rollout}
        if self.global_steps in victims:
            os.kill(victims[self.global_steps].processes[0].pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "one_step_off"])
def test_deaths_under_the_stream_lose_and_repeat_no_prompt(tmp_path: Path, ray_cluster: None, mode: str):
    task = make_task(tmp_path / "task")
    run = run_training(overrides(task, tmp_path, *RUN, f"trainer.mode={mode}"), RayWorkerGroup, Killing)
    uids = [uid for step in run.trained for uid in step]
    assert len(uids) == len(set(uids)) == 32
    assert run.history[-1]["training/agents_restarts"] == 1
    assert run.history[-1]["training/generation_restarts"] == 1


class Stopping(Notes, AsyncPPOTrainer):
    def _answers(self, prompts: DataProto, metrics: dict[str, float]) -> DataProto:
        if self.global_steps == 2:
            os.kill(self.groups.rollout.processes[0].pid, signal.SIGSTOP)
        return super()._answers(prompts, metrics)


@pytest.mark.slow
def test_a_replica_that_is_stopped_is_found_while_the_trainer_waits(tmp_path: Path, ray_cluster: None, caplog):
    task, limit = make_task(tmp_path / "task"), "trainer.hang_timeout=10"
    fresh = ("trainer.mode=async", "trainer.max_staleness=0", limit)
    run = run_training(overrides(task, tmp_path, *RUN, *fresh), RayWorkerGroup, Stopping)
    assert [len(step) for step in run.trained] == [8] * 4
    assert run.history[-1]["training/generation_restarts"] == 1
    assert any("is stopped (SIGSTOP)" in record.message for record in caplog.records)
