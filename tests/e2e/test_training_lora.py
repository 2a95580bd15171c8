"""Whole runs with LoRA: the actor is its own reference, only adapters learn, resuming, files that load."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tests.support.training_harness import make_task, overrides, run_training
from verl.utils.fs import resolve_model_path

LORA = (
    "actor_rollout_ref.model.lora_rank=8",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.optim.lr=3e-2",
    "data.val_files=[]",
)
GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4")


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict[str, str]:
    return make_task(tmp_path_factory.mktemp("task"))


def test_grpo_with_lora_starts_at_its_reference_raises_the_reward_and_generates_what_it_scores(task, tmp_path):
    steps = ("trainer.total_training_steps=8", "data.train_batch_size=4")
    alone = "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra]"
    trainer = run_training(overrides(task, tmp_path, *GRPO, *LORA, *steps, alone))
    history = trainer.history
    assert trainer.ref_policy_wg is trainer.actor_wg
    assert history[0]["kl/mean"] == 0, "without adapters the model is what it started from"
    assert history[-1]["kl/mean"] > 0
    assert all(row["rollout_corr/log_prob_diff_max"] < 1e-4 for row in history), "adapters generate"
    assert history[-1]["reward/mean"] > history[0]["reward/mean"] + 0.1
    saved = tmp_path / "checkpoints" / "global_step_8" / "actor"
    assert {path.name for path in saved.iterdir()} == {"model", "model.json", "optimizer", "extra.pt", "lora_adapter"}


@pytest.mark.parametrize(
    "more",
    [
        ("trainer.mode=async", "trainer.max_staleness=0"),
        ("actor_rollout_ref.rollout.free_weights=True", "actor_rollout_ref.model.target_modules=[q_proj,down_proj]"),
    ],
)
def test_responses_have_the_log_probs_of_training_in_other_modes(task, tmp_path, more):
    steps = ("trainer.total_training_steps=3", "data.train_batch_size=4")
    run = run_training(overrides(task, tmp_path, *GRPO, *LORA, *steps, *more))
    assert len(run.history) == 3
    assert all(row["rollout_corr/log_prob_diff_max"] < 1e-4 for row in run.history)
    assert run.history[-1]["kl/mean"] != 0


@pytest.mark.slow
def test_ppo_with_lora_resumes_bit_for_bit_and_leaves_files_that_load(task, tmp_path):
    both = ("critic.model.lora_rank=4", "critic.checkpoint.save_contents=[model,optimizer,extra,hf_model]")
    schedule = ("actor_rollout_ref.actor.optim.total_training_steps=4", "critic.optim.total_training_steps=4")
    more = (*LORA, *both, *schedule)
    uninterrupted = run_training(overrides(task, tmp_path / "uninterrupted", *more, "trainer.total_training_steps=2"))
    run_training(overrides(task, tmp_path / "parts", *more, "trainer.total_training_steps=1"))
    parts = run_training(overrides(task, tmp_path / "parts", *more, "trainer.total_training_steps=2"))
    assert all(torch.equal(value, parts.final_weights[name]) for name, value in uninterrupted.final_weights.items())

    step = tmp_path / "parts" / "checkpoints" / "global_step_2"
    merged = AutoModelForCausalLM.from_pretrained(resolve_model_path(step))
    assert all(torch.equal(value, parts.final_weights[name]) for name, value in merged.state_dict().items())
    base = AutoModelForCausalLM.from_pretrained(task["model"])
    adapted = PeftModel.from_pretrained(base, step / "actor" / "lora_adapter")
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, atol=1e-5, rtol=1e-5)
    critic = AutoModelForTokenClassification.from_pretrained(step / "critic" / "huggingface")
    assert critic.score.weight.any()
    assert (step / "critic" / "lora_adapter" / "adapter_model.safetensors").is_file()
