"""A user's own script calls the phases and the worker groups one by one, with parameters of its own."""

from __future__ import annotations

import pytest
import torch

from tests.support.training_harness import close, make_task, make_trainer, overrides
from verl.protocol import DataProto

GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "data.val_files=[]")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calls")
    made = make_trainer(overrides(make_task(folder), folder, *GRPO))
    made.init_workers()
    yield made
    close(made)


@pytest.fixture(scope="module")
def answered(trainer):
    """8 prompts, 2 answers each."""
    from verl.trainer.common.phases import Phases

    trainer.phases = Phases(None, None)
    trainer.actor_wg.update_rollout_weights(0)
    return trainer._generate(trainer.prompts.take(8))


def test_generation_takes_sampling_parameters_of_the_call(trainer, answered):
    prompts = answered.select(["prompts", "attention_mask", "position_ids"], ["uid"])
    width = prompts.batch["prompts"].shape[1]
    prompts.batch["attention_mask"] = prompts.batch["attention_mask"][:, :width]
    prompts.rename("prompts", "input_ids")
    generate = trainer.rollout_wg.generate_sequences
    short = generate(prompts, max_new_tokens=3, ignore_eos=True).batch["response_mask"].sum(-1)
    assert short.tolist() == [3] * len(prompts)
    again = [generate(prompts, do_sample=False).batch["responses"] for _ in range(2)]
    assert torch.equal(*again)
    with pytest.raises(RuntimeError, match="no sampling parameter 'heat'"):
        generate(prompts, heat=1.0)


def test_an_engines_error_names_the_whole_key(trainer, answered):
    limit = trainer.config.actor_rollout_ref.rollout.max_model_len
    long = dict.fromkeys(("input_ids", "attention_mask"), torch.ones(2, limit, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=f"no room in actor_rollout_ref.rollout.max_model_len={limit}"):
        trainer.rollout_wg.generate_sequences(DataProto.from_dict(long))


def test_rewards_advantages_and_updates_are_called_without_metrics(trainer, answered):
    batch = trainer._compute_advantage(trainer._compute_reward(answered))
    assert {"token_level_scores", "advantages", "returns"} <= set(batch.batch.keys())
    batch = batch.union(trainer.actor_wg.compute_log_prob(batch))
    found = [
        trainer.actor_wg.update_actor(batch.select(), **given).meta_info["metrics"]["actor/lr"]
        for given in ({}, {"ppo_epochs": 3}, {"ppo_mini_batch_size": 8}, {"ppo_epochs": 2, "ppo_mini_batch_size": 2})
    ]
    # 16 rows of 8 prompts; the configuration says mini-batches of 4 prompts and one pass.
    assert [len(steps) for steps in found] == [2, 6, 1, 8]


def test_the_step_has_two_names(trainer):
    trainer.global_steps = 7
    assert trainer.global_step == 7
