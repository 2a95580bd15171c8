"""Training with the engine in a process of its own is training with it inside, bit for bit, also when it is killed."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.training_harness import make_task, overrides, run_training
from verl.config.names import ROLLOUTS
from verl.trainer.asynchronous.trainer import AsyncPPOTrainer
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

GRPO = ("algorithm=grpo", "actor_rollout_ref.rollout.n=2", "trainer.test_freq=2")


class Disturbed(RayPPOTrainer):
    """Its engine is killed in the generation of the first step, and while it has nothing to do in the second."""

    def _engine(self) -> int:
        return self.actor_wg.worker.rollout.pid

    def _generate(self, batch: Any) -> Any:
        if self.global_steps == 1:
            self._stop_and_kill()
        return super()._generate(batch)

    def _stop_and_kill(self) -> None:
        engine = self._engine()
        os.kill(engine, signal.SIGSTOP)  # not one answer comes before it dies
        threading.Timer(0.3, os.kill, (engine, signal.SIGKILL)).start()

    def _compute_reward(self, batch: Any, metrics: dict[str, float] | None = None) -> Any:
        if self.global_steps == 2:
            os.kill(self._engine(), signal.SIGKILL)
        return super()._compute_reward(batch, metrics)


class DisturbedStream(Disturbed, AsyncPPOTrainer):
    """Its engine is killed with what a stream has asked of it, which is open since the step before."""

    def _collect_rollouts(self, prompts: Any, metrics: dict[str, float]) -> Any:
        if self.global_steps == 2:
            self._stop_and_kill()
        return super()._collect_rollouts(prompts, metrics)

    def _generate(self, batch: Any) -> Any:
        return AsyncPPOTrainer._generate(self, batch)


CLOCKED = ("timing", "perf", "checkpoint", "training/", "reward/scored_while")
MODES = {
    "sync": (Disturbed, ()),
    "agents": (Disturbed, ("actor_rollout_ref.rollout.mode=async",)),
    "stream": (DisturbedStream, ("trainer.mode=async", "trainer.max_staleness=0")),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_killed_or_not_training_is_what_it_is_with_the_engine_inside(mode, tmp_path, monkeypatch, caplog):
    task = make_task(tmp_path)
    inside = run_training(overrides(task, tmp_path / "inside", *GRPO))
    monkeypatch.setitem(ROLLOUTS, "native", replace(ROLLOUTS["native"], package="torch"))
    trainer, more = MODES[mode]
    hosted = run_training(overrides(task, tmp_path / "hosted", *GRPO, *more), trainer_cls=trainer)
    assert hosted.history[-1]["training/generation_restarts"] == 2.0
    assert "was killed by SIGKILL" in caplog.text
    for name, value in inside.final_weights.items():
        assert torch.equal(hosted.final_weights[name], value), name
    for ours, theirs in zip(hosted.history, inside.history, strict=True):
        same = {name for name in theirs if not name.startswith(CLOCKED)}
        assert {name: ours[name] for name in same} == pytest.approx({name: theirs[name] for name in same}, nan_ok=True)
