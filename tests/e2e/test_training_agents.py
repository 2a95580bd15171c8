"""Agents on Ray: loop workers and separate replicas equal one process, also when one of them dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.training_harness import STEADY, make_task, overrides, run_training
from verl.single_controller.ray import RayWorkerGroup

ROLLOUT = "actor_rollout_ref.rollout"
RUN = (
    *STEADY,
    "algorithm.adv_estimator=grpo",
    f"{ROLLOUT}.n=2",
    f"{ROLLOUT}.mode=async",
    "data.max_response_length=16",
    "trainer.test_freq=1",
)
APART = ("resource_pool_spec={train: [1], generate: [2]}", "role_mapping={actor: train, rollout: generate}")
SAME = ("reward/mean", "actor/loss", "actor/grad_norm", "actor/entropy", "num_turns/mean", "val/toy/accuracy")

# Takes its whole process, or that of a replica, with it; once.
FATAL = """
import os, signal
from pathlib import Path
from tests.support.agents import TwoTurns

class Fatal(TwoTurns):
    async def run(self, sampling_params, **row):
        for place in Path({folder!r}).glob("kill-*"):
            if row["step"] == 2 and not row["validate"] and row["sample_index"] == 1:
                victim = place.read_text() or os.getpid()
                place.unlink()
                os.kill(int(victim), signal.SIGKILL)
        return await super().run(sampling_params, **row)
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_task(tmp_path_factory.mktemp("task"))


def fatal(folder: Path) -> str:
    file = folder / "fatal.py"
    file.write_text(FATAL.format(folder=str(folder)))
    return f"{ROLLOUT}.agent.default_agent_loop={file}:Fatal"


def assert_same_run(one: list[dict[str, float]], other: list[dict[str, float]]) -> None:
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        for name in SAME:
            assert (name in mine) == (name in theirs)
            assert mine.get(name) == pytest.approx(theirs.get(name), rel=1e-4, abs=1e-6), (mine["step"], name)


@pytest.mark.slow
def test_loop_workers_and_replicas_of_their_own_train_as_one_process_also_when_a_worker_dies(
    task: dict[str, str], tmp_path: Path, ray_cluster: None
):
    loop = f"{ROLLOUT}.agent.default_agent_loop=tests.support.agents.TwoTurns"
    here = run_training(overrides(task, tmp_path / "here", *RUN, loop))
    (tmp_path / "kill-worker").write_text("")
    workers = f"{ROLLOUT}.agent.num_workers=2"
    apart = run_training(overrides(task, tmp_path / "ray", *RUN, *APART, workers, fatal(tmp_path)), RayWorkerGroup)
    assert_same_run(apart.history, here.history)
    assert not (tmp_path / "kill-worker").exists()
    assert [step.get("training/agents_restarts") for step in apart.history] == [None, 1.0]


@pytest.mark.slow
def test_a_replica_that_dies_under_agents_is_started_anew_and_the_run_is_the_same(
    task: dict[str, str], tmp_path: Path, ray_cluster: None
):
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    class Killing(RayPPOTrainer):
        def _sync_weights(self) -> None:
            super()._sync_weights()
            (tmp_path / "kill-replica").write_text(str(self.rollout_wg.processes[1].pid))

    loop = f"{ROLLOUT}.agent.default_agent_loop=tests.support.agents.TwoTurns"
    here = run_training(overrides(task, tmp_path / "here", *RUN, loop))
    workers = f"{ROLLOUT}.agent.num_workers=1"
    apart = run_training(
        overrides(task, tmp_path / "ray", *RUN, *APART, workers, fatal(tmp_path)), RayWorkerGroup, Killing
    )
    assert_same_run(apart.history, here.history)
    assert apart.history[-1]["training/generation_restarts"] >= 1
