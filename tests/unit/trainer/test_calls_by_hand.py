"""A user's own script calls the phases and the worker groups one by one, with parameters of its own."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import pytest
import torch

from tests.support.training_harness import close, make_task, make_trainer, overrides, policy_worker
from verl.protocol import DataProto
from verl.single_controller.base import ClassWithInitArgs
from verl.single_controller.local import LocalWorkerGroup
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, Role
from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker

PPO = ("algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=True", "data.val_files=[]")
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
    trainer.actor_wg.update_rollout_weights(0)
    return trainer._generate(trainer.state.prompts.take(8))


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
    with pytest.raises(RuntimeError, match=r"generate_sequences: .*'heat'.*'temperature'"):
        generate(prompts, heat=1.0)


def test_an_engines_error_names_the_whole_key(trainer, answered):
    limit = trainer.config.actor_rollout_ref.rollout.max_model_len
    long = dict.fromkeys(("input_ids", "attention_mask"), torch.ones(2, limit, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=f" actor_rollout_ref.rollout.max_model_len={limit}"):
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


@pytest.mark.parametrize(
    ("names", "owner"),
    [
        ("actor_wg actor_rollout_wg", "groups.actor"),
        ("rollout_wg", "groups.rollout"),
        ("ref_policy_wg", "groups.reference"),
        ("critic_wg", "groups.critic"),
        ("rm_wg", "groups.reward_model"),
        ("reward_fn reward_manager", "generator.reward_fn"),
        ("global_steps global_step", "state.step"),
        ("policy_version", "state.policy_version"),
        ("kl_ctrl_in_reward", "state.kl_controller"),
    ],
)
def test_an_assigned_attribute_is_the_one_that_the_collaborators_use(trainer, names, owner):
    before = attrgetter(owner)(trainer)
    for name in names.split():
        assert getattr(trainer, name) is before
        assigned = object()
        setattr(trainer, name, assigned)
        try:
            assert attrgetter(owner)(trainer) is assigned
            assert all(getattr(trainer, other) is assigned for other in names.split())
        finally:
            setattr(trainer, name, before)


def test_an_assigned_validation_reward_and_phase_are_used(trainer, monkeypatch):
    calls: list[bool] = []
    generate = trainer._generate_rows

    def noting(batch: DataProto, validate: bool) -> DataProto:
        calls.append(validate)
        return generate(batch, validate)

    def half(data: DataProto, return_dict: bool = False) -> dict[str, Any]:
        scores = torch.zeros(data.batch["responses"].shape)
        scores[:, -1] = 0.5
        return {"reward_tensor": scores, "reward_extra_info": {}}

    rows = [next(iter(trainer.train_dataloader))]
    monkeypatch.setattr(trainer, "val_dataloader", rows)
    monkeypatch.setattr(trainer, "_generate_rows", noting)
    monkeypatch.setattr(trainer, "val_reward_fn", half)
    metrics = trainer._validate()
    assert calls == [True]
    assert [value for name, value in metrics.items() if name.endswith("/reward/mean@1")] == [0.5]


# ---------------------------------------------------------------- the debugging recipe


class OwnGroups(RayPPOTrainer):
    """Creates worker groups of its own."""

    created: tuple[str, ...] = ()

    def _create_actor_rollout_worker_group(self):
        self.created = (*self.created, "policy")
        return super()._create_actor_rollout_worker_group()

    def _create_critic_worker_group(self):
        self.created = (*self.created, "critic")
        prepared = ClassWithInitArgs(CriticWorker, self.config.critic)
        return LocalWorkerGroup(self.resource_pool_manager.get_resource_pool(Role.Critic), prepared)


@pytest.fixture(scope="module")
def ppo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ppo")
    trainer = make_trainer(overrides(make_task(folder), folder, *PPO), trainer_cls=OwnGroups)
    trainer.init_workers()
    yield trainer
    close(trainer)


def prompts_of(trainer) -> DataProto:
    return DataProto.from_single_dict(next(iter(trainer.train_dataloader)))


def check_policy_of_rollout(trainer, gen: DataProto) -> None:
    """The rollout sampled from the actor's current weights."""
    computed = trainer.actor_rollout_wg.compute_log_prob(gen).batch["old_log_probs"]
    mask = gen.batch["response_mask"].bool()
    torch.testing.assert_close(gen.batch["rollout_log_probs"][mask], computed[mask], rtol=0, atol=1e-4)


def test_the_debugging_recipe_runs_from_the_dataloader_to_the_updates(ppo):
    batch = prompts_of(ppo)
    gen = ppo.actor_rollout_wg.generate_sequences(batch)
    check_policy_of_rollout(ppo, gen)
    batch = batch.union(gen)
    width = gen.batch["prompts"].shape[1] + gen.batch["responses"].shape[1]
    assert batch.batch["input_ids"].shape == (8, width)
    assert torch.equal(batch["old_log_probs"], gen.batch["rollout_log_probs"])
    reward = ppo._compute_reward(batch)
    assert torch.equal(reward["rewards"], reward.batch["token_level_scores"])
    assert batch["ground_truth"].tolist() == [row["ground_truth"] for row in batch["reward_model"]]
    for group, method in (
        (ppo.actor_rollout_wg, "compute_log_prob"),
        (ppo.ref_policy_wg, "compute_ref_log_prob"),
        (ppo.critic_wg, "compute_values"),
    ):
        batch = batch.union(getattr(group, method)(batch))
    assert torch.equal(batch["ref_log_probs"], batch.batch["ref_log_prob"])
    batch = ppo._compute_advantage(batch)
    assert torch.equal(batch["rewards"], batch.batch["token_level_rewards"])
    before = ppo.critic_wg.compute_values(batch).batch["values"]
    for group, method, loss in ((ppo.critic_wg, "update_critic", "critic"), (ppo.actor_wg, "update_actor", "actor")):
        update = getattr(group, method)
        # 8 prompts of one row each; the configuration has mini-batches of 4 prompts and one epoch.
        for arguments, steps in (
            ({}, 2),
            ({"ppo_epochs": 3}, 6),
            ({"ppo_mini_batch_size": 8}, 1),
            ({"ppo_epochs": 2, "ppo_mini_batch_size": 2}, 8),
        ):
            assert len(update(batch, **arguments).meta_info["metrics"][f"{loss}/lr"]) == steps, (method, arguments)
    assert not torch.equal(before, ppo.critic_wg.compute_values(batch).batch["values"])
    again = ppo.actor_rollout_wg.generate_sequences(prompts_of(ppo))
    check_policy_of_rollout(ppo, again)


@pytest.mark.parametrize("variant", ["generated only", "prompt columns popped", "generated first", "narrow prompts"])
def test_generated_answers_are_scored_in_every_variant_of_the_recipe(ppo, variant):
    batch, columns = prompts_of(ppo), ["input_ids", "attention_mask", "position_ids"]
    uids = batch["uid"].tolist()
    if variant == "narrow prompts":
        width = int(batch.batch["attention_mask"].sum(-1).max())
        for name in columns:
            batch.batch[name] = batch.batch[name][:, -width:]
    asked = batch.pop(columns) if variant == "prompt columns popped" else batch
    gen = ppo.actor_rollout_wg.generate_sequences(asked)
    joined = {"generated only": lambda: gen, "generated first": lambda: gen.union(batch)}
    scored = ppo._compute_reward(joined.get(variant, lambda: batch.union(gen))())
    expected = ppo.reward_manager(scored, return_dict=True)["reward_tensor"]
    assert torch.equal(scored["rewards"], expected)
    assert scored["uid"].tolist() == uids


def test_answers_to_other_prompts_do_not_join(ppo):
    gen = ppo.actor_rollout_wg.generate_sequences(prompts_of(ppo))
    other = prompts_of(ppo)
    other.reorder([1, 0, *range(2, 8)])
    with pytest.raises(ValueError, match=r"^union: 'input_ids' "):
        other.select(non_tensor_batch_keys=[]).union(gen)


def test_worker_groups_are_created_by_methods_that_a_subclass_overrides(ppo):
    assert ppo.created == ("policy", "critic")
    assert isinstance(policy_worker(ppo.critic_wg), CriticWorker)
    assert ppo.critic_wg.handle(0).host is not ppo.actor_rollout_wg.handle(0).host, "a group of the subclass's own"
    assert ppo.reward_manager is ppo.reward_fn


def test_a_creating_method_without_a_result_is_an_error(tmp_path):
    class Forgetful(RayPPOTrainer):
        def _create_actor_rollout_worker_group(self):
            super()._create_actor_rollout_worker_group()

    trainer = make_trainer(overrides(make_task(tmp_path), tmp_path, *GRPO), trainer_cls=Forgetful)
    with pytest.raises(ValueError, match=r"Forgetful\._create_actor_rollout_worker_group .*None\b"):
        trainer.init_workers()
    close(trainer)


@pytest.mark.slow
def test_a_whole_step_a_validation_and_a_checkpoint_are_called_by_hand(tmp_path):
    arguments = overrides(make_task(tmp_path), tmp_path, "algorithm=grpo", "actor_rollout_ref.rollout.n=2")
    trainer = make_trainer(arguments)
    trainer.init_workers()
    metrics = trainer._train_step(prompts_of(trainer))
    assert metrics["actor/grad_norm"] > 0
    assert trainer.policy_version == 1
    assert any(name.startswith("val") for name in trainer._validate())
    RayPPOTrainer._log_metrics(trainer, metrics, step=trainer.global_step)
    trainer._save_checkpoint()
    trainer.state.saver.wait()
    assert (tmp_path / "checkpoints" / "global_step_0").is_dir()
    trainer.tracking.close()
    close(trainer)


# ---------------------------------------------------------------- the reference, models


def test_a_group_without_a_reference_names_the_one_that_has_it(ppo):
    batch = ppo.actor_rollout_wg.generate_sequences(prompts_of(ppo))
    with pytest.raises(RuntimeError, match=r"trainer\.ref_policy_wg"):
        ppo.actor_rollout_wg.compute_ref_log_prob(batch)


@pytest.mark.parametrize("serves", ["role actor_rollout_ref", pytest.param("lora", marks=pytest.mark.slow)])
def test_the_policy_serves_the_reference(tmp_path, monkeypatch, serves):
    from verl.trainer.main_ppo import TaskRunner

    if serves == "role actor_rollout_ref":
        monkeypatch.setattr(TaskRunner, "add_ref_policy_worker", lambda self, config: None)
        monkeypatch.setattr(
            TaskRunner,
            "add_actor_rollout_worker",
            lambda self, config: self._add(config, Role.ActorRolloutRef, ActorRolloutRefWorker, "actor"),
        )
    more = ["actor_rollout_ref.actor.use_kl_loss=True", "trainer.total_training_steps=1"]
    more += ["actor_rollout_ref.model.lora_rank=4"] if serves == "lora" else []
    arguments = overrides(make_task(tmp_path), tmp_path, *GRPO, *more)
    trainer = make_trainer(arguments)
    trainer.init_workers()
    gen = trainer.actor_rollout_wg.generate_sequences(prompts_of(trainer))
    reference = trainer.actor_rollout_wg.compute_ref_log_prob(gen)
    mask = gen.batch["response_mask"].bool()
    torch.testing.assert_close(
        reference["ref_log_probs"][mask], gen.batch["rollout_log_probs"][mask], rtol=0, atol=1e-4
    )
    assert trainer.use_reference_policy
    trainer.fit()
    close(trainer)
    assert all("actor/kl_loss" in step for step in trainer.history)
    assert abs(trainer.history[0]["kl/mean"]) < 1e-4, "the policy of the first step is the reference"


@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_init_model_takes_the_path_of_another_model(ppo, tmp_path, kind):
    config = ppo.config
    path = make_task(tmp_path, hidden_size=32)["model"]
    prepared = {
        "policy": ClassWithInitArgs(ActorRolloutRefWorker, config.actor_rollout_ref, "ref"),
        "critic": ClassWithInitArgs(CriticWorker, config.critic),
    }[kind]
    group = LocalWorkerGroup(ray_cls_with_init=prepared)
    group.init_model(model_path=path)
    worker = policy_worker(group)
    engine = worker.engine if kind == "critic" else worker.ref_engine
    shapes = {tuple(tensor.shape) for bucket in engine.buckets(None, 1 << 30) for tensor in bucket.values()}
    assert (32,) in shapes, shapes
