"""Whole runs on the in-process controller: invariants of PPO and its variants, resuming, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.training_harness import SCORERS, actor_weights, make_task, make_trainer, overrides, run_training
from verl.algos.registry import POLICY_LOSSES
from verl.trainer.common.training_health import NonFiniteError

GRPO = (*SCORERS, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4")


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict[str, str]:
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def grpo_run(task, tmp_path_factory):
    """Two steps with all dumps: the trainer and the folder of its files."""
    folder = tmp_path_factory.mktemp("grpo")
    dumps = ("trainer.dump_steps=[2]", f"trainer.rollout_data_dir={folder / 'answers'}")
    return run_training(overrides(task, folder, *GRPO, *dumps, "data.val_files=[]")), folder


def without_times(history: list[dict]) -> list[dict]:
    timed = ("timing", "perf", "reward/scored_while_generating")  # how busy the machine was
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in history]


def test_the_first_update_starts_from_the_policy_that_generated(task, tmp_path):
    """One optimizer step per batch: ratio 1 and KL 0 exactly where nothing has moved yet."""
    one_step = ("actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.actor.use_kl_loss=True")
    trainer = run_training(overrides(task, tmp_path, *one_step))
    first, second = trainer.history[:2]
    assert first["kl/mean"] == 0, "the reference's log-probs equal the initial actor's"
    assert second["kl/mean"] != 0
    for row in trainer.history:
        assert row["actor/ppo_ratio"] == pytest.approx(1.0, abs=1e-5)
        assert row["actor/approx_kl"] == pytest.approx(0.0, abs=1e-5)
        assert row["rollout_corr/log_prob_diff_max"] < 1e-4, "generation and training agree on the log-probs"
        assert row["actor/grad_norm"] > 0
        assert row["critic/grad_norm"] > 0


def test_four_steps_equal_two_and_two_resumed_bit_for_bit(task, tmp_path):
    more = ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", "data.train_batch_size=8")
    schedule = ("actor_rollout_ref.actor.optim.total_training_steps=12", "critic.optim.total_training_steps=12")
    uninterrupted = run_training(
        overrides(task, tmp_path / "uninterrupted", *more, *schedule, "trainer.total_training_steps=4")
    )
    first = run_training(overrides(task, tmp_path / "parts", *more, *schedule, "trainer.total_training_steps=2"))
    second = run_training(overrides(task, tmp_path / "parts", *more, *schedule, "trainer.total_training_steps=4"))
    assert [row["step"] for row in second.history] == [3, 4]
    assert without_times(first.history)[:1] == without_times(uninterrupted.history)[:1]
    assert without_times(second.history)[:1] == without_times(uninterrupted.history)[2:3]
    for name, value in uninterrupted.final_weights.items():
        assert torch.equal(value, second.final_weights[name]), name


@pytest.mark.slow
def test_the_reward_rises(task, tmp_path):
    steps = ("trainer.total_training_steps=25", "actor_rollout_ref.actor.optim.lr=3e-3", "data.val_files=[]")
    trainer = run_training(overrides(task, tmp_path, *GRPO, *steps))
    rewards = [row["reward/mean"] for row in trainer.history]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15, rewards


def test_micro_batches_do_not_change_the_result(task, tmp_path):
    """The same step in micro-batches of 1 and of all: the same weights to rounding."""
    runs = []
    for size in (1, 16):
        micro = f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={size}"
        run = overrides(task, tmp_path / str(size), *GRPO, micro, "trainer.total_training_steps=1", "data.val_files=[]")
        runs.append(run_training(run))
    assert runs[0].history[0]["actor/loss"] == pytest.approx(runs[1].history[0]["actor/loss"], rel=1e-4, abs=1e-6)
    assert runs[0].history[0]["actor/grad_norm"] == pytest.approx(runs[1].history[0]["actor/grad_norm"], rel=1e-4)


def test_a_loss_that_is_not_finite_never_reaches_the_weights(task, tmp_path, monkeypatch, request):
    """A user's loss that returns NaN: steps are skipped and counted, their batches dumped; then the run stops."""
    (tmp_path / "nan_loss_lib.py").write_text(
        "from verl.trainer.ppo.core_algos import register_policy_loss\n"
        "@register_policy_loss('always_nan')\n"
        "def compute_policy_loss_always_nan(old_log_prob, log_prob, advantages, response_mask, **kwargs):\n"
        "    return log_prob.sum() * float('nan'), {}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import nan_loss_lib  # noqa: F401

    request.addfinalizer(lambda: POLICY_LOSSES.__delitem__("always_nan"))

    run = overrides(
        task,
        tmp_path,
        *GRPO,
        "external_libs=[nan_loss_lib]",
        "actor_rollout_ref.actor.policy_loss.loss_mode=always_nan",
        "trainer.max_nonfinite_steps=2",
        "trainer.total_training_steps=9",
        "data.val_files=[]",
    )
    trainer = make_trainer(run)
    trainer.init_workers()
    with pytest.raises(NonFiniteError, match=r"actor_rollout_ref.actor.optim.lr"):
        trainer.fit()
    trainer.reward_fn.close()
    assert [row["actor/skipped_steps"] for row in trainer.history] == [1.0, 1.0]
    before = make_weights(task)
    for name, value in actor_weights(trainer).items():
        assert torch.equal(before[name], value), name
    assert (tmp_path / "checkpoints" / "debug_step_1.pt").exists()


def test_an_update_that_would_wipe_out_the_weights_is_refused_and_said(task, tmp_path):
    """lr 1e25: before, the first mini-batch wrote it, and the run said that the weights were unchanged."""
    run = overrides(
        task, tmp_path, *GRPO, "actor_rollout_ref.actor.optim.lr=1e25", "data.val_files=[]", "trainer.save_freq=1"
    )
    trainer = make_trainer(run)
    trainer.init_workers()
    advice = r"actor/lr 1e\+25(.|\n)*1e\+25 → 5e\+24.*0\.2 → 0\.1.*kl_loss_coef=0\.01"
    with pytest.raises(NonFiniteError, match=advice):
        trainer.fit()
    trainer.reward_fn.close()
    assert [row["actor/refused_steps"] for row in trainer.history] == [1.0]
    assert trainer.policy_version == 0
    before = make_weights(task)
    for name, value in actor_weights(trainer).items():
        assert torch.equal(before[name], value), name
    assert (tmp_path / "checkpoints" / "debug_step_1.pt").exists()


def test_validation_only_changes_nothing_and_writes_its_answers(task, tmp_path):
    run = overrides(task, tmp_path, "trainer.val_only=True", f"trainer.validation_data_dir={tmp_path / 'val'}")
    trainer = run_training(run)
    assert [row["step"] for row in trainer.history] == [0]
    assert "val/toy/accuracy" in trainer.history[0]
    rows = [json.loads(line) for line in (tmp_path / "val" / "0.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    assert {"input", "output", "score", "step", "scoring_failed"} <= rows[0].keys(), "and what the reward said"
    assert [row["gts"] for row in rows] == [str(i) for i in range(6)]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["val_only"], "its recording"


def test_batches_and_answers_are_written_to_the_configured_folders(grpo_run):
    _, folder = grpo_run
    batch = torch.load(folder / "checkpoints" / "debug_step_2.pt", weights_only=True)
    assert all(isinstance(column, torch.Tensor) for column in batch.values())
    assert batch["responses"].shape[0] == 32
    assert {"advantages", "old_log_probs", "token_level_scores"} <= batch.keys()
    assert not (folder / "checkpoints" / "debug_step_1.pt").exists()
    rows = [json.loads(line) for line in (folder / "answers" / "1.jsonl").read_text().splitlines()]
    assert len(rows) == 32
    assert rows[0]["data_source"] == "toy"
    assert all(row["gts"] == row["reward_model"]["ground_truth"] for row in rows)


def test_a_checkpoint_is_a_model_that_transformers_loads(grpo_run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer, folder = grpo_run
    step = folder / "checkpoints" / "global_step_2"
    exported = step / "actor" / "huggingface"
    state = AutoModelForCausalLM.from_pretrained(exported).state_dict()
    for name, value in trainer.final_weights.items():
        assert torch.equal(state[name], value), name
    assert AutoTokenizer.from_pretrained(exported).chat_template
    assert json.loads((step / "config.json").read_text())["trainer"]


def test_asking_to_stop_finishes_the_step_and_saves(task, tmp_path):
    trainer = make_trainer(overrides(task, tmp_path, *GRPO, "trainer.total_training_steps=50", "data.val_files=[]"))
    trainer.init_workers()
    trainer.stop_requested.set()
    trainer.fit()
    assert trainer.global_steps == 1
    assert (tmp_path / "checkpoints" / "global_step_1").is_dir()
    trainer.reward_fn.close()


def make_weights(task: dict[str, str]) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(Path(task["model"])).state_dict())
