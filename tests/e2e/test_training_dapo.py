"""Runs with dynamic sampling, a greedy baseline and rollout log-probs: the rows they train on, resuming."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.training_harness import STEADY, make_task, make_trainer, overrides, run_training
from verl.single_controller.ray import RayWorkerGroup
from verl.utils.nested import load_plain

REWARD_FILE = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Right or wrong, so that whole groups are equal; the score also rewards short answers and differs more often."""
    right = sum(c < "P" for c in solution_str) > 0.4 * len(solution_str)
    return {"score": right - 0.01 * len(solution_str), "acc": right}
'''
DAPO = (
    "algorithm=grpo",
    "actor_rollout_ref.rollout.n=4",
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.metric=acc",
    "algorithm.filter_groups.max_num_gen_batches=0",
    "data.gen_batch_size=6",
    "actor_rollout_ref.actor.clip_ratio_low=0.2",
    "actor_rollout_ref.actor.clip_ratio_high=0.28",
    "reward_model.reward_kwargs={num_processes: 0}",
    "data.val_files=[]",
)


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict[str, str]:
    files = make_task(tmp_path_factory.mktemp("task"))
    Path(files["reward"]).write_text(REWARD_FILE)
    return files


def without_times(history: list[dict]) -> list[dict]:
    timed = ("timing", "perf", "checkpoint/", "reward/scored_while_generating")  # how busy the machine was
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in history]


class Remembering:
    """Notes the prompts of every generation batch."""

    requested: list[list[str]]

    def _generate_and_score(self, prompts, metrics):
        self.requested = [*getattr(self, "requested", []), prompts.non_tensor_batch["uid"].tolist()]
        return super()._generate_and_score(prompts, metrics)


def remembering() -> type:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    return type("RememberingTrainer", (Remembering, RayPPOTrainer), {})


def test_only_groups_that_differ_are_trained_on(task, tmp_path):
    trainer = run_training(overrides(task, tmp_path, *DAPO), trainer_cls=remembering())
    batch = trainer.last_batch
    accuracy = np.array(batch.non_tensor_batch["acc"], dtype=float).reshape(8, 4)
    assert (accuracy.min(1) < accuracy.max(1)).all()
    assert batch.batch["advantages"].abs().sum(-1).gt(0).all()
    for row in trainer.history:
        assert row["filter_groups/num_gen_batches"] >= 2, "six prompts at a time cannot fill a batch of eight"
        assert 0 < row["filter_groups/kept_share"] <= 1
        assert row["filter_groups/missing_prompts"] == 0
        assert row["actor/grad_norm"] > 0
    assert {len(prompts) for prompts in trainer.requested} == {6}
    assert len(trainer.requested) == sum(row["filter_groups/num_gen_batches"] for row in trainer.history)


@pytest.mark.slow
def test_a_run_resumed_between_two_generation_batches_goes_on_bit_for_bit(task, tmp_path):
    """The checkpoint holds prompts that were drawn and not used: none is lost, none is generated twice."""
    more = ("actor_rollout_ref.actor.optim.total_training_steps=8", "trainer.total_training_steps=4")
    uninterrupted = run_training(
        overrides(task, tmp_path, *DAPO, *more, "trainer.save_freq=1"), trainer_cls=remembering()
    )
    saved = {step: tmp_path / "checkpoints" / f"global_step_{step}" for step in (1, 2, 3)}
    with_waiting = [step for step, path in saved.items() if load_plain(path / "trainer.pt")["prompts"]["waiting"]]
    assert with_waiting, "else this shows nothing"
    step = with_waiting[-1]
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved[step]}")
    resumed = run_training(overrides(task, tmp_path / "two", *DAPO, *more, *resume), trainer_cls=remembering())
    assert uninterrupted.requested[-len(resumed.requested) :] == resumed.requested
    earlier_batches = sum(int(row["filter_groups/num_gen_batches"]) for row in uninterrupted.history[:step])
    assert len(resumed.requested) == len(uninterrupted.requested) - earlier_batches
    assert without_times(resumed.history) == without_times(uninterrupted.history[step:])
    for name, value in uninterrupted.final_weights.items():
        assert torch.equal(value, resumed.final_weights[name]), name


def test_at_the_limit_the_step_trains_on_what_it_has(task, tmp_path):
    """Two generation batches of four prompts for a batch of eight: a smaller batch, no filler."""
    limits = (
        "actor_rollout_ref.rollout.n=2",
        "data.gen_batch_size=4",
        "algorithm.filter_groups.max_num_gen_batches=2",
        "trainer.total_training_steps=1",
    )
    trainer = run_training(overrides(task, tmp_path, *DAPO, *limits))
    (row,) = trainer.history
    assert row["filter_groups/num_gen_batches"] == 2
    missing = int(row["filter_groups/missing_prompts"])
    assert missing > 0, "else this shows nothing"
    mask = trainer.last_batch.batch["response_mask"]
    assert len(mask) == int(mask.any(-1).sum()) == (8 - missing) * 2
    assert row["actor/grad_norm"] > 0


def test_the_greedy_answer_is_the_baseline_of_its_prompt(task, tmp_path):
    run = (
        "algorithm.adv_estimator=remax",
        "actor_rollout_ref.rollout.n=2",
        "reward_model.reward_kwargs={num_processes: 0}",
        "trainer.total_training_steps=1",
        "data.val_files=[]",
    )
    trainer = make_trainer(overrides(task, tmp_path, *run))
    trainer.init_workers()
    batch_sizes: list[int] = []
    generate = trainer._generate_rows

    def counting(batch, validate):
        batch_sizes.append(len(batch))
        return generate(batch, validate)

    trainer._generate_rows = counting
    trainer.fit()
    assert batch_sizes == [8 * 3], "one more answer per prompt, in the same call"
    batch = trainer.last_batch
    assert len(batch) == 16
    baselines = batch.batch["reward_baselines"]
    assert torch.equal(baselines[0::2], baselines[1::2]), "one per prompt"
    scores = batch.batch["token_level_scores"].sum(-1)
    advantage = batch.batch["advantages"][:, 0]
    torch.testing.assert_close(advantage, scores - baselines)
    assert trainer.history[0]["reward/greedy/mean"] == pytest.approx(baselines.mean().item())


def test_bypassing_the_old_log_probs_still_measures_the_mismatch(task, tmp_path):
    bypass = ("algorithm.rollout_correction.bypass_mode=True", "trainer.total_training_steps=1", "data.val_files=[]")
    run = ("algorithm=grpo", "actor_rollout_ref.rollout.n=4", "reward_model.reward_kwargs={num_processes: 0}")
    trainer = run_training(overrides(task, tmp_path, *run, *bypass))
    (row,) = trainer.history
    assert 0 < row["rollout_corr/log_prob_diff_max"] < 1e-4, "measured on real log-probs of both engines"
    assert row["rollout_corr/masked_fraction"] == 0
    assert row["actor/entropy"] > 0
    batch = trainer.last_batch
    assert torch.equal(batch.batch["old_log_probs"], batch.batch["rollout_log_probs"])


@pytest.mark.slow
def test_reinforce_has_the_gradient_of_weighed_answers_without_a_pass_for_old_log_probs(task, tmp_path):
    """One optimizer step: the policy of the update is the one that old log-probs would be of. bfloat16 generates."""
    run = ("algorithm=grpo", "actor_rollout_ref.rollout.n=4", "reward_model.reward_kwargs={num_processes: 0}")
    run += ("trainer.total_training_steps=1", "data.val_files=[]", "actor_rollout_ref.actor.ppo_mini_batch_size=8")
    run += ("actor_rollout_ref.rollout.dtype=bfloat16", "algorithm.rollout_correction.rollout_is_threshold=1.001")
    weighed = run_training(overrides(task, tmp_path / "weighed", *run, "algorithm.rollout_correction.rollout_is=token"))
    bypass = ("algorithm.rollout_correction.bypass_mode=True", "algorithm.rollout_correction.loss_type=reinforce")
    plain = run_training(overrides(task, tmp_path / "plain", *run, *bypass))
    assert torch.equal(weighed.last_batch.batch["responses"], plain.last_batch.batch["responses"])
    assert "rollout_is_weights" not in plain.last_batch.batch.keys()
    norms = [trainer.history[0]["actor/grad_norm"] for trainer in (weighed, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    off = "algorithm.rollout_correction.rollout_is=null"
    unweighed = run_training(overrides(task, tmp_path / "unweighed", *run, *bypass, off))
    assert unweighed.history[0]["actor/grad_norm"] != pytest.approx(norms[0], rel=1e-5)


@pytest.mark.parametrize(
    ("setting", "denominator"),
    [
        ("bypass_mode=True", "drawn"),
        ("rollout_is=token", "drawn"),
        pytest.param("bypass_mode=True", "full", marks=pytest.mark.slow),
        pytest.param("rollout_is=token", "full", marks=pytest.mark.slow),
    ],
)
def test_truncated_sampling_is_measured_and_its_log_probs_can_be_the_denominator(task, tmp_path, setting, denominator):
    run = ("algorithm=grpo", "actor_rollout_ref.rollout.n=4", "reward_model.reward_kwargs={num_processes: 0}")
    cut = ("actor_rollout_ref.rollout.top_k=8", f"algorithm.rollout_correction.denominator={denominator}")
    short = ("trainer.total_training_steps=1", "data.val_files=[]", f"algorithm.rollout_correction.{setting}")
    trainer = run_training(overrides(task, tmp_path, *run, *cut, *short))
    (row,) = trainer.history
    assert row["rollout_corr/engine_log_prob_diff"] < 1e-4
    assert row["rollout_corr/truncation_kl"] > 0.5
    assert row["rollout_corr/kl"] == pytest.approx(row["rollout_corr/truncation_kl"], abs=1e-3)
    batch = trainer.last_batch.batch
    mask, full, drawn = (batch[name] for name in ("response_mask", "rollout_log_probs", "rollout_drawn_log_probs"))
    used = {"full": full, "drawn": drawn}[denominator]
    if setting.startswith("bypass"):
        assert torch.equal(batch["old_log_probs"], used)
    else:
        assert row["rollout/mismatch_kl"] == pytest.approx(row["rollout_corr/truncation_kl"], abs=1e-3)
        weights = (batch["old_log_probs"] - used).exp().clamp(max=2.0) * mask
        torch.testing.assert_close(batch["rollout_is_weights"], weights)
    assert row["actor/grad_norm"] > 0


def test_one_step_per_batch_measures_truncated_sampling_too(task, tmp_path):
    """Where the update itself gives the old log-probs."""
    run = ("algorithm=grpo", "actor_rollout_ref.rollout.n=4", "reward_model.reward_kwargs={num_processes: 0}")
    short = ("trainer.total_training_steps=1", "data.val_files=[]", "actor_rollout_ref.actor.ppo_mini_batch_size=8")
    trainer = run_training(overrides(task, tmp_path, *run, *short, "actor_rollout_ref.rollout.top_k=8"))
    (row,) = trainer.history
    assert row["rollout/mismatch_kl"] == pytest.approx(row["rollout_corr/truncation_kl"], abs=1e-3)
    assert row["rollout_corr/truncation_kl"] > 0.5


def test_a_rollout_in_another_precision_is_measured_weighed_and_masked(task, tmp_path, caplog):
    """bfloat16 generates, float32 trains: the mismatch is real; sequences that are off by too much are masked."""
    run = (
        "algorithm=grpo",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.dtype=bfloat16",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_rs=geometric",
        "algorithm.rollout_correction.rollout_rs_threshold=1.0002",
        "algorithm.rollout_correction.warn_log_prob_diff=1e-4",
        "reward_model.reward_kwargs={num_processes: 0}",
        "trainer.total_training_steps=1",
        "data.val_files=[]",
    )
    trainer = run_training(overrides(task, tmp_path, *run))
    (row,) = trainer.history
    assert row["rollout_corr/k3_kl"] > 0
    assert row["rollout_corr/ratio_p01"] < 1 < row["rollout_corr/ratio_p99"]
    assert row["rollout_corr/log_prob_diff"] > 1e-4
    assert 0 < row["rollout_corr/masked_sequence_fraction"] < 1
    assert "rollout and training differ by" not in caplog.text, "it is corrected"
    batch = trainer.last_batch.batch
    kept = batch["response_mask"].any(-1)
    assert 1 - kept.float().mean().item() == pytest.approx(row["rollout_corr/masked_sequence_fraction"])
    ratio = (batch["old_log_probs"] - batch["rollout_log_probs"]).exp().clamp(max=2.0)
    torch.testing.assert_close(batch["rollout_is_weights"][kept], (ratio * batch["response_mask"])[kept])
    assert row["actor/grad_norm"] > 0


@pytest.mark.slow
def test_two_ranks_on_ray_select_and_train_as_one(task, tmp_path, ray_cluster):
    """Generation batches stay where they were made; filtering, joining and baselines are the same by reference."""
    both = (*DAPO, *STEADY, "algorithm.adv_estimator=remax", "trainer.total_training_steps=2")
    alone = run_training(overrides(task, tmp_path / "one", *both))
    two = overrides(task, tmp_path / "two", *both, "trainer.n_gpus_per_node=2")
    together = run_training(two, RayWorkerGroup)
    equal_metrics = ("reward/mean", "reward/greedy/mean", "actor/loss", "actor/grad_norm", "filter_groups/kept_share")
    for mine, theirs in zip(alone.history, together.history, strict=True):
        for name in equal_metrics:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
