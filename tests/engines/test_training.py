"""Whole runs of GRPO on an engine: the reward rises, and a run that was stopped goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.engines.engines import MODELS, EngineRow
from tests.support.training_harness import make_task, overrides, run_training

_ROLLOUT = "actor_rollout_ref.rollout"


def flattened(at: str, keys: Mapping[str, Any]) -> list[str]:
    """As the command line spells them; `++`: an engine's own arguments are declared nowhere."""
    found = []
    for name, value in keys.items():
        found += flattened(f"{at}.{name}", value) if isinstance(value, Mapping) else [f"++{at}.{name}={value}"]
    return found


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_task(tmp_path_factory.mktemp("task"), **MODELS["plain"])


def train(task: dict[str, str], folder: Path, engine_name: str, row: EngineRow, *more: str) -> Any:
    engine = [f"{_ROLLOUT}.name={engine_name}", *flattened(_ROLLOUT, row.keys)]
    grpo = ["algorithm.adv_estimator=grpo", f"{_ROLLOUT}.n=8", "trainer.save_freq=4", "trainer.test_freq=-1"]
    return run_training(overrides(task, folder, *engine, *grpo, "actor_rollout_ref.actor.optim.lr=5e-3", *more))


def test_the_reward_of_a_grpo_run_rises_and_a_resumed_run_goes_on(
    task: dict[str, str], tmp_path: Path, engine_name: str, row: EngineRow, running_engine: Any
) -> None:
    running_engine.close()
    first = train(task, tmp_path, engine_name, row, "trainer.total_training_steps=8")
    rewards = [step["critic/score/mean"] for step in first.history if "critic/score/mean" in step]
    assert len(rewards) == 8
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.1, rewards
    resumed = train(task, tmp_path, engine_name, row, "trainer.total_training_steps=10")
    assert [step["step"] for step in resumed.history if "critic/score/mean" in step] == [9, 10]
    more = [step["critic/score/mean"] for step in resumed.history if "critic/score/mean" in step]
    assert min(more) > rewards[0], "it goes on where it was"
