"""The parts of the trainer: they meet what a subclass makes of a phase, and they work without the trainer."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.support.training_harness import make_task, overrides, policy_worker, run_training
from verl.algos import get_kl_controller
from verl.config import load_config
from verl.single_controller.local import LocalWorkerGroup
from verl.trainer.main_ppo import TaskRunner, create_rl_dataset
from verl.trainer.ppo.generator import Generator
from verl.trainer.ppo.prompts import make_dataloader
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.reward import load_reward_manager
from verl.trainer.ppo.rollout_manager import RolloutManager
from verl.trainer.ppo.row_balancing import row_costs
from verl.trainer.ppo.state import TrainerState
from verl.trainer.ppo.weight_sync import WeightSync
from verl.trainer.ppo.worker_groups import WorkerGroups
from verl.utils import hf_tokenizer
from verl.utils.balancing import SequenceCost
from verl.utils.nested import load_plain

GRPO = ("algorithm=grpo", "actor_rollout_ref.rollout.n=2", "reward_model.reward_kwargs={num_processes: 0}")


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict[str, str]:
    return make_task(tmp_path_factory.mktemp("task"))


class Counting(RayPPOTrainer):
    """Changes phases as a user would: by the methods alone."""

    def __init__(self, *args, **kwargs):
        self.calls: Counter[str] = Counter()
        super().__init__(*args, **kwargs)
        self.kl_ctrl_in_reward = get_kl_controller(self.config.algorithm.kl_ctrl)
        self.kl_ctrl_in_reward.value = 0.25

    def _create_dataloader(self, *datasets):
        assert (self.global_steps, self.policy_version) == (0, 0), "public names are there from the start"
        assert self.reward_fn is self.val_reward_fn
        super()._create_dataloader(*datasets)

    def _sync_weights(self):
        self.calls["weights"] += 1
        super()._sync_weights()

    def _generate_and_score(self, prompts, metrics):
        self.calls["roll_out"] += 1
        return super()._generate_and_score(prompts, metrics)

    def _generate_rows(self, batch, validate):
        self.calls["validation" if validate else "training"] += 1
        return super()._generate_rows(batch, validate)

    def _update(self, method, batch, role):
        self.calls[role] += 1
        return super()._update(method, batch, role)


def test_a_phase_that_a_subclass_changes_is_the_one_that_runs(task, tmp_path):
    """Dynamic sampling asks for as many generation batches as it needs; validation generates too."""
    dapo = ("algorithm.filter_groups.enable=True", "data.gen_batch_size=4", "data.val_max_samples=2")
    trainer = run_training(
        overrides(task, tmp_path, *GRPO, *dapo, "trainer.total_training_steps=1"), trainer_cls=Counting
    )
    batches = trainer.history[0]["filter_groups/num_gen_batches"]
    assert batches >= 2
    assert trainer.calls == {"weights": 2, "roll_out": batches, "training": batches, "validation": 1, "actor": 1}


def test_what_a_subclass_puts_in_place_of_a_part_is_what_is_saved(task, tmp_path):
    run_training(overrides(task, tmp_path, *GRPO, "trainer.total_training_steps=1"), trainer_cls=Counting)
    state = load_plain(tmp_path / "checkpoints" / "global_step_1" / "trainer.pt")
    assert (state["kl_coef"], state["global_steps"], state["policy_version"]) == (0.25, 1, 1)


class Weighing(RayPPOTrainer):
    """Notes what the engine holds while something learns."""

    def _update(self, method, batch, role):
        self.held = policy_worker(self.actor_wg).rollout.held_bytes()["weights"]
        return super()._update(method, batch, role)


@pytest.mark.slow
def test_engines_without_weights_while_training_change_no_bit(task, tmp_path):
    """The critic's warm-up leaves the version as it is, and validations use the next one's weights ahead of a step."""
    steps = (
        "trainer.critic_warmup=1",
        "trainer.test_freq=1",
        "trainer.total_training_steps=2",
        "data.val_max_samples=2",
    )
    freed, kept = (
        run_training(
            overrides(task, tmp_path / str(frees), *steps, f"actor_rollout_ref.rollout.free_weights={frees}"),
            trainer_cls=Weighing,
        )
        for frees in (True, False)
    )
    assert (freed.held, kept.held > 0) == (0, True)
    assert all(torch.equal(freed.final_weights[name], tensor) for name, tensor in kept.final_weights.items())
    for mine, other in zip(freed.history, kept.history, strict=True):
        same = [name for name in other if name.startswith(("actor/", "critic/", "val"))]
        assert [mine[name] for name in same] == [other[name] for name in same]


def test_the_parts_generate_score_and_learn_without_a_trainer(task, tmp_path):
    """As another trainer would put them together."""
    config, runner = load_config(None, overrides(task, tmp_path, *GRPO)), TaskRunner()
    runner.add_actor_rollout_worker(config)
    pools, tokenizer = runner.init_resource_pool_mgr(config), hf_tokenizer(config.actor_rollout_ref.model.path)
    groups = WorkerGroups(config, runner.role_worker_mapping, pools, LocalWorkerGroup, "cpu")
    reward_fn = load_reward_manager(config, tokenizer)
    generator = Generator(config, tokenizer, groups, RolloutManager(config, groups), reward_fn, groups.infer)
    dataset = create_rl_dataset(config.data.train_files, config.data, tokenizer, None)
    state = TrainerState(config, runner.role_worker_mapping, None)
    state.set_dataloader(make_dataloader(dataset, config.data))
    try:
        groups.start()
        generator.start()
        WeightSync(groups).sync(state.policy_version)
        metrics: dict[str, float] = {}
        rows = generator.rollout_rows(state.prompts.take(8))
        answered = generator.generate(rows, 1, False, reward_fn, retry=lambda call: call())
        batch = generator.score(answered, metrics, step=1)
        batch = batch.union(groups.infer(groups.actor.compute_log_prob, batch, "actor"))
        batch.batch["advantages"] = torch.ones_like(batch.batch["old_log_probs"])
        learned = groups.update(groups.actor.update_actor, batch, "actor", step=1)
    finally:
        reward_fn.close()
        pools.release()
    assert len(batch) == 16
    assert groups.mfu(batch, {"update_actor": 2.0}) == {}, "the peak rate of this device is unknown"
    groups.device_flops = 1e9
    assert config.actor_rollout_ref.actor.ppo_epochs == 1
    forward = row_costs(batch, SequenceCost.from_folder(config.actor_rollout_ref.model.path)).sum()
    required = pytest.approx(3 * forward / 2e9)
    assert groups.mfu(batch, {"update_actor": 2.0}) == {"perf/mfu/actor": required, "perf/mfu/actor_computed": required}
    shared = groups.mfu(batch, {"update_actor": 2.0}, saving=0.25)
    assert shared == {"perf/mfu/actor": required, "perf/mfu/actor_computed": pytest.approx(0.75 * 3 * forward / 2e9)}
    assert groups.mfu(batch, {}) == {}
    assert batch.batch["token_level_scores"].sum(-1).gt(0).any()
    assert learned["actor/grad_norm"] > 0
