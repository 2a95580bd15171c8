"""Whole training steps on trajectories of several rows in uneven groups: nothing on the way counts rows."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.agent_rows import AgentRollout
from tests.support.training_harness import make_task, overrides, run_training
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.workers.roles import policy

GRPO = ("algorithm=grpo", "actor_rollout_ref.rollout.n=4", "data.val_files=[]")
DYNAMIC = ("algorithm.filter_groups.enable=True", "data.gen_batch_size=6")


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict[str, str]:
    return make_task(tmp_path_factory.mktemp("agents"))


@pytest.fixture(autouse=True)
def agent(monkeypatch) -> None:
    monkeypatch.setattr(policy, "open_rollout", AgentRollout)


class Kept(RayPPOTrainer):
    """Keeps every batch that was trained on."""

    def _record_step(self, batch, metrics) -> None:
        super()._record_step(batch, metrics)
        self.kept = [*getattr(self, "kept", []), batch]


def run(task: dict[str, str], folder: Path, *settings: str) -> Kept:
    common = ("actor_rollout_ref.rollout.name=hf", "data.max_response_length=16", "actor_rollout_ref.rollout.seed=1")
    one_step = "trainer.total_training_steps=1"
    return run_training(overrides(task, folder, *common, one_step, *settings), trainer_cls=Kept)


def rows_and_answers(trainer: Kept) -> tuple[list[int], list[int]]:
    """Per step, after checking that the stub did what it is for."""
    names = [batch.non_tensor_batch["trajectory"] for batch in trainer.kept]
    assert {1, 2, 3} <= {count for step in names for count in Counter(step).values()}
    answers = [Counter(name.split("/")[0] for name in set(step)) for step in names]
    assert len({count for step in answers for count in step.values()}) > 1, "groups of one size only"
    return [len(step) for step in names], [sum(step.values()) for step in answers]


def test_dynamic_sampling_dumps_and_validation_count_trajectories(task, tmp_path):
    dumps = (f"trainer.rollout_data_dir={tmp_path / 'rollouts'}", f"trainer.validation_data_dir={tmp_path / 'val'}")
    validation = (f"data.val_files={task['val']}", "trainer.test_freq=1", "actor_rollout_ref.rollout.val_kwargs.n=2")
    trainer = run(task, tmp_path, *GRPO, *DYNAMIC, *dumps, *validation)
    rows, answers = rows_and_answers(trainer)
    for step, metrics in enumerate(trainer.history):
        lines = [json.loads(line) for line in (tmp_path / f"rollouts/{step + 1}.jsonl").read_text().splitlines()]
        assert len(lines) == answers[step] < rows[step]
        assert metrics["critic/score/mean"] == pytest.approx(np.mean([line["score"] for line in lines]))
        turns = [2 * len(line.get("rows", [None])) for line in lines]
        assert metrics["num_turns/mean"] == pytest.approx(np.mean(turns))
        assert metrics["response_length/min"] >= 3 + 1 + 1, "two turns and what the tool said"
    written = [json.loads(line) for line in (tmp_path / "val/1.jsonl").read_text().splitlines()]
    assert len({line["uid"] for line in written}) == 6
    assert 6 < len(written) <= 12
    assert any("rows" in line for line in written)
    scores = [np.mean([line["score"] for line in written if line["uid"] == uid]) for uid in {w["uid"] for w in written}]
    named = {name: value for name, value in trainer.history[-1].items() if name.startswith("val-core/toy/reward/mean@")}
    means = [value for name, value in named.items() if not name.endswith(("low", "high"))]
    assert min(scores) <= min(means) <= max(means) <= max(scores)


def test_a_critic_goes_on_where_answers_were_cut(task, tmp_path):
    """PPO with KL in the reward: last_value is asked for and used for answers that a limit cut."""
    settings = ("algorithm.truncated_responses=bootstrap", "algorithm.use_kl_in_reward=True", "data.val_files=[]")
    trainer = run(
        task, tmp_path, *settings, "actor_rollout_ref.rollout.n=2", "algorithm.lam=1.0", "algorithm.gamma=1.0"
    )
    rows_and_answers(trainer)
    batch = trainer.kept[0]
    assert batch.batch["last_value"].shape == (len(batch),)
    names, reasons = (batch.non_tensor_batch[name] for name in ("trajectory", "finish_reason"))
    last = [row for row, name in enumerate(names) if row + 1 == len(names) or names[row + 1] != name]
    assert {"length", "stop"} == {reasons[row] for row in last}
    for row in last:
        end = int(batch.batch["response_mask"][row].nonzero().max())
        after = float(batch.batch["last_value"][row]) if reasons[row] == "length" else 0.0
        expected = float(batch.batch["token_level_rewards"][row, end]) + after
        assert float(batch.batch["returns"][row, end]) == pytest.approx(expected, abs=1e-5)
    assert all(np.isfinite(metrics["critic/loss"]) for metrics in trainer.history)


def test_answers_that_were_cut_can_be_left_out_of_the_update(task, tmp_path):
    trainer = run(task, tmp_path, *GRPO, "algorithm.truncated_responses=mask")
    rows_and_answers(trainer)
    batch, metrics = trainer.kept[0], trainer.history[0]
    names, reasons = (batch.non_tensor_batch[name] for name in ("trajectory", "finish_reason"))
    cut = {
        names[row] for row in range(len(names)) if {**dict(zip(names, reasons, strict=True))}[names[row]] == "length"
    }
    learned = batch.batch["response_mask"].any(-1).tolist()
    assert learned == [name not in cut for name in names]
    assert True in learned
    assert False in learned
    scores = batch.batch["token_level_scores"].sum(-1)
    assert metrics["critic/score/mean"] == pytest.approx(float(scores.sum()) / len(set(names))), "all are scored"


def test_the_greedy_baseline_of_a_prompt_may_have_several_rows(task, tmp_path):
    settings = ("algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.n=2", "data.val_files=[]")
    trainer = run(task, tmp_path, *settings)
    batch = trainer.kept[0]
    assert "reward_baselines" in batch.batch.keys()
    by_prompt = {}
    for uid, baseline in zip(batch.non_tensor_batch["uid"], batch.batch["reward_baselines"].tolist(), strict=True):
        assert by_prompt.setdefault(uid, baseline) == baseline
    weights = trainer.final_weights.values()
    assert all(torch.isfinite(weight).all() for weight in weights)
