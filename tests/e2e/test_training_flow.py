"""Overlap changes no result: old log-probs from the update, rewards during generation, dynamic batches."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.support.training_harness import SCORERS, STEADY, make_task, overrides, run_training
from verl.single_controller.ray import RayWorkerGroup

ACTOR = "actor_rollout_ref.actor"
ONE_STEP = (f"{ACTOR}.ppo_mini_batch_size=8", "critic.ppo_mini_batch_size=8", "data.val_files=[]")
GRPO = (*SCORERS, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4")
# Answers of many lengths, two at a time: most are finished long before the last.
IN_WAVES = ("data.max_response_length=20", "actor_rollout_ref.rollout.max_num_seqs=2")
SEPARATE = (f"{ACTOR}.old_log_prob_from_update=False", "reward_model.overlap=False")


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict[str, str]:
    return make_task(tmp_path_factory.mktemp("task"))


# Metrics that depend on time.
TIMES = ("timing", "perf", "checkpoint/", "reward/scored_while_generating", "memory")
ASYNC_TIMES = ("agent_loop/", "async/", "rollouter/", "trainer/")


def assert_same_training(one, other, ignored: tuple[str, ...] = TIMES) -> None:
    for name, value in one.final_weights.items():
        assert torch.equal(value, other.final_weights[name]), name
    for mine, theirs in zip(one.history, other.history, strict=True):
        names = {name for name in mine.keys() | theirs.keys() if not name.startswith(ignored)}
        for name in sorted(names):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-7), (mine["step"], name)


@pytest.fixture(scope="module")
def flowing(task, tmp_path_factory):
    """One step without a separate log-prob pass, with rewards computed during generation."""
    return run_training(one_step(task, tmp_path_factory.mktemp("flowing")))


def one_step(task: dict[str, str], folder: Path, *more: str) -> list[str]:
    return overrides(task, folder, *GRPO, *ONE_STEP, *IN_WAVES, "trainer.total_training_steps=1", *more)


@pytest.mark.slow
def test_a_step_without_a_log_prob_pass_that_scores_while_it_generates_is_the_same_step(task, tmp_path, flowing):
    """Weights are bit-identical; entropy, mismatch and reward metrics are present; the saved passes are absent."""
    plain = run_training(one_step(task, tmp_path, *SEPARATE))
    assert_same_training(flowing, plain)
    for row in flowing.history:
        assert "timing_s/old_log_prob" not in row
        assert {"actor/entropy", "rollout/log_prob_diff_p99", "rollout_corr/log_prob_diff"} <= row.keys()
        assert row["actor/ppo_ratio"] == 1.0
        assert row["reward/scored_while_generating"] > 0
    for row in plain.history:
        assert "timing_s/old_log_prob" in row
        assert "reward/scored_while_generating" not in row


def test_stale_responses_are_weighted_by_the_update_as_by_a_separate_pass(task, tmp_path):
    """With one_step_off, the second and third step train responses of an older policy."""
    stale = ("trainer.mode=one_step_off", f"{ACTOR}.optim.lr=0.01", "trainer.total_training_steps=3")
    runs = {}
    for name, more in (("own", ()), ("separate", SEPARATE)):
        runs[name] = run_training(overrides(task, tmp_path / name, *GRPO, *ONE_STEP, *stale, *more))
    assert_same_training(runs["own"], runs["separate"], TIMES + ASYNC_TIMES)
    assert ["timing_s/old_log_prob" in row for row in runs["own"].history] == [False] * 3
    assert ["timing_s/old_log_prob" in row for row in runs["separate"].history] == [True] * 3
    assert all(row["rollout_corr/log_prob_diff"] > 0.01 for row in runs["own"].history[1:]), "stale tokens differ"


def test_data_columns_with_internal_names_change_nothing(task, tmp_path, flowing):
    """Groups, samples and scores are the trainer's: the same weights as without the columns."""
    rows = pq.read_table(task["train"]).to_pylist()
    given = {"uid": "one and the same", "sample_index": 0, "do_sample": False, "row": 0, "scoring_failed": 1.0}
    pq.write_table(pa.Table.from_pylist([row | given for row in rows]), tmp_path / "named.parquet")
    named = task | {"train": str(tmp_path / "named.parquet")}
    assert_same_training(flowing, run_training(one_step(named, tmp_path)))


@pytest.mark.slow
def test_two_mini_batches_and_a_waiting_actor_have_a_log_prob_pass(task, tmp_path):
    """The second mini-batch starts from another policy; an actor that does not learn has no update to take it from."""
    warming = ("trainer.critic_warmup=1", "algorithm.adv_estimator=gae")
    trainer = run_training(overrides(task, tmp_path / "warm", *ONE_STEP, *warming))
    assert ["timing_s/old_log_prob" in row for row in trainer.history] == [True, False]
    assert ["actor/loss" in row for row in trainer.history] == [False, True]
    assert all({"actor/entropy", "critic/loss"} <= row.keys() for row in trainer.history)
    halves = (*ONE_STEP, f"{ACTOR}.ppo_mini_batch_size=4", "trainer.total_training_steps=1")
    trainer = run_training(overrides(task, tmp_path / "halves", *GRPO, *halves))
    assert "timing_s/old_log_prob" in trainer.history[0]


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["gspo", "cispo", "geo_mean", "sapo", "gpg", "kl_cov", "clip_cov"])
def test_every_loss_gives_the_same_weights_with_and_without_the_pass(task, tmp_path, loss):
    mode = f"{ACTOR}.policy_loss.loss_mode={loss}"
    runs = [
        run_training(overrides(task, tmp_path / str(len(more)), *GRPO, *ONE_STEP, mode, *more))
        for more in ((), SEPARATE)
    ]
    assert_same_training(*runs)


@pytest.mark.slow
def test_ppo_with_a_reference_gives_the_same_weights_with_and_without_the_pass(task, tmp_path):
    more = (*ONE_STEP, f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.entropy_coeff=0.01", f"{ACTOR}.use_dynamic_bsz=True")
    runs = [run_training(overrides(task, tmp_path / str(len(way)), *more, *way)) for way in ((), SEPARATE)]
    assert_same_training(*runs)
    assert runs[0].history[0]["kl/mean"] == 0


@pytest.mark.slow
def test_on_two_ranks_answers_are_scored_while_others_are_generated(task, tmp_path, ray_cluster):
    both = (*GRPO, *ONE_STEP, *IN_WAVES, *STEADY)
    two = ("trainer.n_gpus_per_node=2", f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=256")
    one = run_training(overrides(task, tmp_path / "one", *both, *SEPARATE))
    flow = run_training(overrides(task, tmp_path / "two", *both, *two), RayWorkerGroup)
    for mine, theirs in zip(one.history, flow.history, strict=True):
        assert theirs["reward/scored_while_generating"] > 0
        assert theirs["global_seqlen/balanced_max_over_mean"] >= 1
        for name in ("reward/mean", "actor/loss", "actor/grad_norm", "actor/entropy", "rollout_corr/log_prob_diff"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
