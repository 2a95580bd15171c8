"""What a run reads: the dataloaders of its datasets, how many steps they make, and how many optimizer steps those."""

from __future__ import annotations

from typing import Any

from verl.config import PPOConfig
from verl.config.plan import batch_plan
from verl.trainer.common.loader import BatchLoader
from verl.trainer.ppo.prompts import make_dataloader

__all__ = ["run_loaders", "schedule_steps"]


def run_loaders(
    config: PPOConfig, train: Any, val: Any, collate_fn: Any = None, sampler: Any = None
) -> tuple[BatchLoader, BatchLoader | None]:
    """Of the training prompts, and of those to validate on, if there are any."""
    data = config.data
    loader = make_dataloader(train, data, collate_fn, sampler)
    if val is None or not len(val):
        return loader, None
    return loader, make_dataloader(val, data, collate_fn, batch_size=data.val_batch_size or len(val))


def schedule_steps(config: PPOConfig, batches: int) -> int:
    """The run's steps, where an epoch has so many batches; learning-rate schedules without a length get theirs."""
    prompts = batches * config.data.gen_batch_size * config.trainer.total_epochs
    steps = config.trainer.total_training_steps or prompts // config.data.train_batch_size
    plan = batch_plan(config)
    for block, update in ((config.actor_rollout_ref.actor, plan.actor), (config.critic, plan.critic)):
        if update is not None and block.optim.total_training_steps is None:
            block.optim.total_training_steps = steps * update.optimizer_steps
    return steps
