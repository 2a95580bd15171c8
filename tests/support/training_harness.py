"""Training runs for tests: a tiny model and a toy task whose reward it can improve, with any overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tests.support.tiny import STEADY_EPS, save_tiny_model

# For runs whose final weights are compared: keeps rounding differences small (see STEADY_EPS).
STEADY = (f"actor_rollout_ref.actor.optim.eps={STEADY_EPS}", f"critic.optim.eps={STEADY_EPS}")

# Rewards as in a real run: computed by other processes while generation continues.
SCORERS = ("reward_model.reward_kwargs={num_processes: 2}",)

REWARD_FILE = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of characters below "P" in the alphabet of bytes: easy to improve, and it differs between responses."""
    return sum(c < "P" for c in solution_str) / max(1, len(solution_str))
'''


def make_task(folder: Path, rows: int = 32, **model: Any) -> dict[str, str]:
    """Write model, data and reward; return paths by name."""
    save_tiny_model(folder / "model", **model)
    table = [
        {
            "data_source": "toy",
            "prompt": [{"role": "user", "content": f"Say {i} {'very ' * (i % 4)}well"}],
            "ability": "toy",
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(rows)
    ]
    pq.write_table(pa.Table.from_pylist(table), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(table[:6]), folder / "val.parquet")
    (folder / "reward.py").write_text(REWARD_FILE)
    names = {"model": "model", "train": "train.parquet", "val": "val.parquet", "reward": "reward.py"}
    return {name: str(folder / file) for name, file in names.items()}


def overrides(task: dict[str, str], folder: Path, *more: str) -> list[str]:
    """The command line of a small run."""
    return [
        f"data.train_files={task['train']}",
        f"data.val_files={task['val']}",
        "data.train_batch_size=8",
        "data.max_prompt_length=48",
        "data.max_response_length=8",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={task['model']}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "critic.ppo_mini_batch_size=4",
        f"custom_reward_function.path={task['reward']}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        "trainer.logger=[file]",
        "trainer.val_before_train=False",
        "trainer.log_val_generations=0",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.total_training_steps=2",
        *more,
    ]


def make_trainer(arguments: list[str], group_cls: Any = None, trainer_cls: Any = None) -> Any:
    """A trainer on the in-process controller (or another group class), which records its metrics in `.history`.

    On the in-process controller rewards are computed in this process, too, unless a key other than the function's path
    contains "reward": starting scorer processes takes a third of the time of a small run.
    """
    from verl.config import load_config
    from verl.single_controller.local import LocalWorkerGroup
    from verl.trainer.main_ppo import TaskRunner, create_rl_dataset, create_rl_sampler
    from verl.trainer.ppo.reward import load_reward_manager
    from verl.utils import hf_tokenizer

    keys = {word.partition("=")[0] for word in arguments} - {"custom_reward_function.path"}
    in_process = group_cls is None and not any("reward" in key for key in keys)
    config = load_config(None, [*arguments, *(["reward_model.reward_kwargs={num_processes: 0}"] * in_process)])
    runner = TaskRunner()
    for register in ("actor_rollout", "critic", "reward_model", "ref_policy", "teacher"):
        getattr(runner, f"add_{register}_worker")(config)
    tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)

    class Recording(trainer_cls or runner._trainer_class(config)):
        history: list[dict[str, float]]

        def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
            self.history.append({"step": step, **metrics})

    train = create_rl_dataset(config.data.train_files, config.data, tokenizer, None)
    val = (
        create_rl_dataset(config.data.val_files, config.data, tokenizer, None, is_train=False)
        if config.data.val_files
        else None
    )
    reward = load_reward_manager(config, tokenizer, num_examine=0)
    trainer = Recording(
        config,
        tokenizer,
        runner.role_worker_mapping,
        runner.init_resource_pool_mgr(config),
        ray_worker_group_cls=group_cls or LocalWorkerGroup,
        reward_fn=reward,
        val_reward_fn=reward,
        train_dataset=train,
        val_dataset=val,
        train_sampler=create_rl_sampler(config.data, train),
        device_name="cpu",
    )
    trainer.history = []
    return trainer


def run_training(arguments: list[str], group_cls: Any = None, trainer_cls: Any = None) -> Any:
    """Run the training; return the trainer with `.history` and `.final_weights`."""
    trainer = make_trainer(arguments, group_cls, trainer_cls)
    try:
        trainer.init_workers()
        trainer.fit()
        trainer.final_weights = actor_weights(trainer)
    finally:
        close(trainer)
    return trainer


def close(trainer: Any) -> None:
    trainer.reward_fn.close()
    trainer.resource_pool_manager.release()


def actor_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """The actor's weights (in-process groups only)."""
    worker = policy_worker(trainer.actor_wg)
    if worker is None:
        return {}
    return {name: tensor.clone() for bucket in worker.engine.buckets(None, 1 << 30) for name, tensor in bucket.items()}


def policy_worker(group: Any) -> Any:
    """The worker of a policy's group (in-process groups only; else None)."""
    from verl.single_controller.local import LocalWorkerGroup

    return group.worker if isinstance(group, LocalWorkerGroup) else None
