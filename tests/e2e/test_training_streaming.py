"""Asynchronous training on Ray: loop workers, replicas, trainer ranks and controllers die under the stream."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.support.tiny import tiny_config, tiny_tokenizer
from tests.support.trained_prompts import PromptRecordingTrainer
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


class Noting(PromptRecordingTrainer, AsyncPPOTrainer):
    pass


class Killing(Noting):
    def _record_step(self, batch: DataProto, metrics: dict[str, float]) -> None:
        super()._record_step(batch, metrics)
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


@pytest.mark.slow
def test_ranks_that_share_an_engine_train_and_score_only_while_it_stands_still(tmp_path: Path, ray_cluster: None):
    """Answers are under way through updates, also those of a reward model's batch. Asked to overlap, they must not:
    `tests.support.exclusive_steps` ends a run whose ranks do."""
    task = make_task(tmp_path / "task")
    torch.manual_seed(1)
    judge = AutoModelForSequenceClassification.from_config(tiny_config(num_labels=1))
    judge.save_pretrained(tmp_path / "judge")
    tiny_tokenizer().save_pretrained(tmp_path / "judge")
    shared = ("trainer.n_gpus_per_node=2", f"{ROLLOUT}.tensor_model_parallel_size=2", "trainer.overlap=True")
    scored = ("reward_model.enable=True", f"reward_model.path={tmp_path / 'judge'}", "custom_reward_function.path=null")
    more = (
        "trainer.mode=async",
        "external_libs=[tests.support.exclusive_steps]",
        f"{ROLLOUT}.ignore_eos=True",
        *shared,
        *scored,
    )
    run = run_training(overrides(task, tmp_path, *RUN[2:], *more), RayWorkerGroup, Noting)
    uids = [uid for step in run.trained for uid in step]
    assert len(uids) == len(set(uids)) == 32
    assert max(step["async/partial_share"] for step in run.history) > 0, "nothing was under way"


class Stopping(Noting):
    def _collect_rollouts(self, prompts: DataProto, metrics: dict[str, float]) -> DataProto:
        if self.global_steps == 2:
            os.kill(self.groups.rollout.processes[0].pid, signal.SIGSTOP)
        return super()._collect_rollouts(prompts, metrics)


@pytest.mark.slow
def test_a_replica_that_is_stopped_is_found_while_the_trainer_waits(tmp_path: Path, ray_cluster: None, caplog):
    task, limit = make_task(tmp_path / "task"), "trainer.hang_timeout=10"
    fresh = ("trainer.mode=async", "trainer.max_staleness=0", limit)
    run = run_training(overrides(task, tmp_path, *RUN, *fresh), RayWorkerGroup, Stopping)
    assert [len(step) for step in run.trained] == [8] * 4
    assert run.history[-1]["training/generation_restarts"] == 1
    assert any("is stopped (SIGSTOP)" in record.message for record in caplog.records)


def kill_after(step: int, process: subprocess.Popen, folder: Path, name: str, deadline: float) -> None:
    """The largest process of the run that is called so, when this step is saved and later answers are under way.

    Of ranks that is the trainer's: loop workers have no model.
    """
    while not (folder / "checkpoints" / f"global_step_{step}").is_dir():
        assert process.poll() is None, (folder / "log.txt").read_text()[-3000:]
        assert time.monotonic() < deadline, (folder / "log.txt").read_text()[-3000:]
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    named = [member for member in family if member.name().startswith(name)]
    max(named, key=lambda member: member.memory_info().rss).kill()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["async", "one_step_off"])
def test_a_killed_trainer_rank_and_a_killed_controller_lose_and_repeat_no_prompt(tmp_path: Path, mode: str):
    """The real command, which starts again by itself: every prompt of the epoch is in the answers of just one step.

    Three starts, most of which are imports: what a busy machine makes of that is not what is tested.
    """
    deadline = time.monotonic() + 840
    task, steps = make_task(tmp_path / "task", rows=64), range(1, 9)
    more = (f"trainer.mode={mode}", "trainer.save_freq=1", f"trainer.rollout_data_dir={tmp_path / 'answers'}")
    grpo = ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2", "trainer.total_training_steps=8", "data.val_files=[]")
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(task, tmp_path, *grpo, *more)]
    with (tmp_path / "log.txt").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path, env={**os.environ, "RAY_ADDRESS": "local"}
        )
        try:
            kill_after(2, process, tmp_path, "ray::RayRank", deadline)
            kill_after(5, process, tmp_path, "ray::TaskRunner", deadline)
            assert process.wait(deadline - time.monotonic()) == 0, (tmp_path / "log.txt").read_text()[-3000:]
        finally:
            process.kill()
    files = [(tmp_path / "answers" / f"{step}.jsonl").read_text().splitlines() for step in steps]
    prompts = [{json.loads(line)["input"] for line in lines} for lines in files]
    assert [len(step) for step in prompts] == [8] * 8
    assert len(set().union(*prompts)) == 64
    assert (tmp_path / "log.txt").read_text().count("\nrestart ") == 2
