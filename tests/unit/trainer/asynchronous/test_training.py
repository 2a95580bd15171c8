"""Whole asynchronous runs in one process with the real engine: what they train on, and when."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.support.moe_runs import REPLAY, moe_overrides, moe_task
from tests.support.router_cases import CHOSEN, LAYERS, UNKNOWN
from tests.support.trained_prompts import PromptRecordingTrainer
from tests.support.training_harness import SCORERS, close, make_task, make_trainer, overrides, run_training
from verl.agent.outputs import failed_trajectory
from verl.inference.async_engine import AsyncEngine
from verl.inference.engine import Engine
from verl.protocol import DataProto
from verl.trainer.asynchronous.trainer import AsyncPPOTrainer
from verl.trainer.asynchronous.utilization import Utilization
from verl.trainer.ppo.rollout_jobs import store_trajectories
from verl.workers.rollout.call_trace import CallTrace

ROLLOUT = "actor_rollout_ref.rollout"
GRPO = (*SCORERS, "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2", "trainer.total_training_steps=3")
ASYNC = (*GRPO, "trainer.mode=async")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_task(tmp_path_factory.mktemp("stream"))


def measured(history: list[dict[str, float]], names: Iterable[str]) -> list[dict[str, float]]:
    """But for what a clock says."""
    clocked = ("timing", "perf/", "checkpoint/", "reward/scored_while")
    return [{name: step[name] for name in names if not name.startswith(clocked)} for step in history]


def test_without_staleness_it_is_the_synchronous_run_bit_for_bit(task: dict[str, str], tmp_path: Path):
    validated = (*GRPO, "trainer.test_freq=2")
    waits = run_training(overrides(task, tmp_path / "sync", *validated))
    streams = run_training(overrides(task, tmp_path / "async", *validated, *ASYNC, "trainer.max_staleness=0"))
    assert len(streams.history) == len(waits.history) == 3
    for step, names in enumerate(waits.history):
        assert measured(streams.history[step : step + 1], names) == measured([names], names)
    assert all(torch.equal(streams.final_weights[name], waits.final_weights[name]) for name in waits.final_weights)
    assert {step["async/staleness/max"] for step in streams.history} == {0.0}


class Timing(AsyncPPOTrainer):
    """`added`: what each validation adds to the seconds of its step's generation."""

    added: tuple[float, ...] = ()

    def _validate(self) -> dict[str, float]:
        before = self.phases.seconds["gen"]
        found = super()._validate()
        self.added = (*self.added, self.phases.seconds["gen"] - before)
        return found


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_one_step_off_trains_batches_of_the_weights_before(task, tmp_path: Path, overlap: bool):
    """Also if the engine is idle while training uses its devices. Old log-probs come from the update. A step does not
    wait for what a validation waits for."""
    one_update = ("actor_rollout_ref.actor.ppo_mini_batch_size=8", "critic.ppo_mini_batch_size=8")
    plain = "algorithm.rollout_correction.rollout_is=null"
    given = ("trainer.mode=one_step_off", f"trainer.overlap={overlap}", "trainer.test_freq=2", plain, *one_update)
    trained = run_training(overrides(task, tmp_path, *GRPO, *given), trainer_cls=Timing)
    assert trained.added == (0.0, 0.0)
    assert [step["async/staleness/mean"] for step in trained.history] == [0.0, 1.0, 1.0]
    assert all(step["async/partial_share"] == 0 for step in trained.history)
    assert not any("timing_s/old_log_prob" in step for step in trained.history), "the update computes them"


def test_stale_answers_are_weighed_by_what_drew_them(task, tmp_path: Path):
    """In the first step nothing is stale; in the second the ratio to the weights before is no longer 1."""
    trained = run_training(overrides(task, tmp_path, *GRPO, "trainer.mode=one_step_off"))
    given, mask = trained.last_batch.batch, trained.last_batch.batch["response_mask"]
    ratio = (given["old_log_probs"] - given["rollout_log_probs"]).exp()
    torch.testing.assert_close(given["rollout_is_weights"], ratio.clamp(max=2.0) * mask)
    moved = [step["rollout_corr/log_prob_diff"] for step in trained.history]
    assert moved[0] < 1e-4 < min(moved[1:])


class Noting(PromptRecordingTrainer, AsyncPPOTrainer):
    pass


class Stopping(Noting):
    last = 2


@dataclass
class Gate:
    """A request that the engine has alone gets a few tokens of each version of the weights, until it may end."""

    tokens: Counter[int] = field(default_factory=Counter)
    open: threading.Event = field(default_factory=threading.Event)

    def put_into(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made, step = AsyncEngine.__init__, Engine.step

        def noted(driver: AsyncEngine, engine: Any, *args: Any, **kwargs: Any) -> None:
            made(driver, engine, *args, **kwargs)
            engine.driver = driver

        def gated(engine: Any) -> Any:
            if engine.driver.unfinished == 1 and not self.open.is_set():
                if self.tokens[engine.version] >= 5:
                    time.sleep(0.005)
                    return []
                self.tokens[engine.version] += 1
            return step(engine)

        monkeypatch.setattr(AsyncEngine, "__init__", noted)
        monkeypatch.setattr(Engine, "step", gated)


LONG = (
    "algorithm.adv_estimator=reinforce_plus_plus",
    "data.max_response_length=80",
    f"{ROLLOUT}.ignore_eos=True",
    "data.shuffle=False",
    f"{ROLLOUT}.n=1",
    "trainer.mode=async",
    "trainer.overlap=True",
)


def task_with_a_long_answer(folder: Path) -> dict[str, str]:
    """To the first prompt one of 80 tokens, all others have 8."""
    task = make_task(folder, rows=64)
    table = pq.read_table(task["train"])
    limits = pa.array([80, *([8] * (len(table) - 1))])
    pq.write_table(table.append_column("max_new_tokens", limits), task["train"])
    return task


@pytest.mark.slow
def test_a_long_answer_holds_nobody_up_and_is_trained_when_it_is_there(tmp_path: Path, monkeypatch):
    """It goes on through the updates of four steps."""
    task, gate = task_with_a_long_answer(tmp_path / "task"), Gate()
    gate.put_into(monkeypatch)

    class Freeing(Noting):
        def _record_step(self, batch: DataProto, metrics: dict[str, float]) -> None:
            super()._record_step(batch, metrics)
            while not gate.open.is_set() and not gate.tokens[self.policy_version - 1]:
                time.sleep(0.005)
            if self.global_steps == 4:
                gate.open.set()

    steps = ("trainer.max_staleness=6", "trainer.total_training_steps=7")
    run = run_training(overrides(task, tmp_path, *LONG, *steps), trainer_cls=Freeing)
    uids = [uid for step in run.trained for uid in step]
    assert len(uids) == len(set(uids)) == 56
    of_answers = [(number, found) for number, step in enumerate(run.trained, 1) for found in step.values()]
    trained_in, versions = max(of_answers, key=lambda answer: len(answer[1]))
    assert trained_in > 4
    assert len(versions) >= 4
    assert all(step["async/in_flight"] + step["async/queue_depth"] <= 56 - 8 * step["step"] for step in run.history)


@pytest.mark.slow
def test_what_is_answered_during_an_update_is_known_before_anything_is_dropped(tmp_path: Path, monkeypatch, caplog):
    """The long answer ends in the second update: it is too old then, but finished. It is asked again and trained."""
    task, gate, under_way = task_with_a_long_answer(tmp_path / "task"), Gate(), [0]
    gate.put_into(monkeypatch)
    count = Utilization.set_in_flight

    def counted(utilization: Utilization, answers: int) -> None:
        count(utilization, answers)
        under_way.append(answers)

    monkeypatch.setattr(Utilization, "set_in_flight", counted)

    class Waiting(Noting):
        def _record_step(self, batch: DataProto, metrics: dict[str, float]) -> None:
            super()._record_step(batch, metrics)
            if self.global_steps == 2:
                gate.open.set()
                while under_way[-1]:
                    time.sleep(0.005)
                time.sleep(0.2)  # it is on its way from the thread that counted it

    steps = ("trainer.max_staleness=1", "trainer.staleness_strategy=drop", "trainer.total_training_steps=4")
    with caplog.at_level("INFO"):
        run = run_training(overrides(task, tmp_path, *LONG, *steps), trainer_cls=Waiting)
    dropped = [(step["async/dropped/in_flight"], step["async/dropped/finished"]) for step in run.history]
    assert dropped == [(0, 0), (0, 0), (0, 1), (0, 0)]
    uids = [uid for step in run.trained for uid in step]
    assert len(uids) == len(set(uids)) == 32
    assert sum("Utilization: " in record.message for record in caplog.records) == 1


def test_resume_loses_and_repeats_no_prompt(task: dict[str, str], tmp_path: Path):
    more = ("trainer.max_staleness=2", "trainer.total_training_steps=4", "trainer.staleness_strategy=drop")
    run = overrides(task, tmp_path, *ASYNC, *more)
    first = run_training(run, trainer_cls=Stopping)
    second = run_training(run, trainer_cls=Noting)
    uids = [uid for step in (*first.trained, *second.trained) for uid in step]
    assert [len(first.trained), len(second.trained)] == [2, 2]
    assert len(uids) == len(set(uids)) == 32
    assert second.history[0]["async/staleness/max"] > 0, "answers of before are taken up"


@pytest.mark.slow
def test_resume_with_another_number_of_answers_asks_all_that_were_ahead_again(task: dict[str, str], tmp_path: Path):
    run = overrides(task, tmp_path, *ASYNC, "trainer.max_staleness=2", "trainer.total_training_steps=4")
    first = run_training(run, trainer_cls=Stopping)
    second = run_training([*run, f"{ROLLOUT}.n=3", "data.max_response_length=6"], trainer_cls=Noting)
    uids = [uid for step in (*first.trained, *second.trained) for uid in step]
    assert len(uids) == len(set(uids)) == 32
    assert second.last_batch.batch["responses"].shape == (24, 6)
    assert second.history[0]["async/staleness/max"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ("algorithm.filter_groups.enable=True", "data.gen_batch_size=12"),
        ("algorithm.adv_estimator=remax",),
        (f"{ROLLOUT}.agent.default_agent_loop=tests.support.agents.TwoTurns", "trainer.staleness_strategy=drop"),
        ("trainer.partial_rollout=False", f"{ROLLOUT}.name=hf"),
    ],
    ids=["dynamic sampling", "greedy baselines", "agents", "hf engine"],
)
def test_what_trains_waiting_trains_streaming(task: dict[str, str], tmp_path: Path, more: tuple[str, ...]):
    checks = ("trainer.test_freq=1", "trainer.save_freq=1", "trainer.max_staleness=2")
    run = run_training(overrides(task, tmp_path, *ASYNC, *checks, *more), trainer_cls=Noting)
    assert [len(step) for step in run.trained] == [8, 8, 8]
    uids = [uid for step in run.trained for uid in step]
    assert len(set(uids)) == 24
    assert "val-core/toy/reward/mean@1" in run.history[-1]


@pytest.mark.slow
def test_a_synchronous_run_goes_on_from_an_asynchronous_one(task: dict[str, str], tmp_path: Path):
    """What was asked ahead, it asks again: no prompt is lost, none comes twice."""
    first = run_training(overrides(task, tmp_path, *ASYNC, "trainer.total_training_steps=4"), trainer_cls=Stopping)
    second = run_training(
        overrides(task, tmp_path, *GRPO, "trainer.total_training_steps=4"), trainer_cls=PromptRecordingTrainer
    )
    uids = [uid for step in (*first.trained, *second.trained) for uid in step]
    assert len(uids) == len(set(uids)) == 32


def test_a_batch_whose_agents_all_failed_has_the_column_of_experts(tmp_path: Path):
    """Dynamic sampling joins it with others, and an update that replays experts requires it."""
    run = moe_overrides(moe_task(tmp_path / "task"), tmp_path, f"{REPLAY}=R3", "trainer.mode=async")
    trainer = make_trainer(run)
    try:
        trainer.init_workers()
        stream = trainer.stream
        group = stream.new_group(trainer.state.prompts.take(1))
        failed = [
            failed_trajectory(KeyError("x"), CallTrace(), group.state.name, number, [5, 6, 7], 8) for number in range(2)
        ]
        restored = store_trajectories(
            failed, trainer.config.actor_rollout_ref, trainer.generator.meta(1, validate=False), use_ray=False
        )
        group.state.finished = {one.name: one for one in restored}
        batch = stream.responses(stream.group_prompts([group]))
    finally:
        close(trainer)
    experts = batch.batch["routed_experts"]
    assert experts.shape == (2, batch.batch["input_ids"].shape[1], LAYERS, CHOSEN)
    assert experts.dtype == torch.uint8
    assert (experts == UNKNOWN).all()
