"""Whole runs of a mixture: updates go through the experts of the generation (R3) or of the old log-probs (R2)."""

from __future__ import annotations

import pytest
import torch

from tests.support.moe_runs import REPLAY, RouterChangingTrainer, moe_overrides, moe_task
from tests.support.router_cases import UNKNOWN
from tests.support.training_harness import run_training
from verl.single_controller.ray import RayWorkerGroup, column_store

LR = "actor_rollout_ref.actor.optim.lr"


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict[str, str]:
    return moe_task(tmp_path_factory.mktemp("task"))


def test_r3_updates_go_through_the_experts_of_the_generation_whatever_became_of_the_routers(task, tmp_path):
    trainer = run_training(moe_overrides(task, tmp_path, f"{REPLAY}=R3"), None, RouterChangingTrainer)
    (row,) = trainer.history
    recorded, replayed = trainer.expert_choices()
    assert torch.equal(replayed, recorded)
    assert 0.2 < row["actor/moe/replaced"] < 0.9
    assert row["actor/moe/busiest"] > 1.0
    assert 0.0 <= row["actor/moe/idle"] < 1.0
    assert row["rollout_corr/log_prob_diff"] > 0.0, "routers weigh the same experts otherwise"
    batch = trainer.last_batch.batch
    sampled, width = batch["response_mask"].bool(), batch["responses"].shape[1]
    prompts, answers = batch["routed_experts"].split([batch["prompts"].shape[1], width], dim=1)
    mask = batch["attention_mask"][:, :-width].bool()
    assert (prompts[mask][:, 0] != UNKNOWN).all(), "of prompts too, cached or not"
    last = sampled.long().sum(1) - 1
    assert (answers[:, :, 0, 0] == UNKNOWN)[torch.arange(len(last)), last].all(), "nothing came after the last token"


@pytest.mark.slow
def test_r2_updates_go_through_the_experts_of_the_old_log_probs(task, tmp_path):
    (row,) = run_training(moe_overrides(task, tmp_path, f"{REPLAY}=R2", f"{LR}=3e-2")).history
    assert row["actor/moe/replaced"] > 0.01, "routers learn, and are told what they chose before"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_the_controller_never_fetches_the_experts(task, tmp_path, ray_cluster, monkeypatch, mode):
    fetched, read = set(), column_store.read_columns

    def noted(columns):
        fetched.update(columns)
        return read(columns)

    monkeypatch.setattr(column_store, "read_columns", noted)
    trainer = run_training(moe_overrides(task, tmp_path, f"{REPLAY}={mode}"), RayWorkerGroup)
    assert "routed_experts" in trainer.last_batch.batch.keys()
    assert "response_mask" in fetched, "what it reads is noted"
    assert "routed_experts" not in fetched
    assert trainer.history[0]["actor/moe/busiest"] > 1.0
