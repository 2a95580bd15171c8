"""Asynchronous training: settings of `trainer.mode`, and the keys they imply."""

from __future__ import annotations

from typing import NamedTuple

from verl.config import names
from verl.config.layout import ROLLOUT, layout_of
from verl.config.ppo import PPOConfig
from verl.config.problems import Report
from verl.config.trainer import TrainerConfig


class AsyncSettings(NamedTuple):
    """Settings of an asynchronous mode."""

    max_staleness: int
    strategy: str
    in_order: bool
    """Groups are trained in the order in which they were submitted."""
    partial: bool
    """Unfinished responses continue across weight syncs; else a weight sync waits for them."""


def async_settings(trainer: TrainerConfig) -> AsyncSettings:
    """Return the settings of a mode other than sync."""
    if trainer.mode == "one_step_off":
        return AsyncSettings(1, "wait", in_order=True, partial=False)
    exact = trainer.max_staleness == 0
    return AsyncSettings(
        trainer.max_staleness, trainer.staleness_strategy, in_order=exact, partial=trainer.partial_rollout
    )


def engine_pauses_in_updates(config: PPOConfig) -> bool:
    """Whether an in-process engine of one rank pauses from the start of an update to the weight sync."""
    rollout = config.actor_rollout_ref.rollout
    alternates = not config.trainer.overlap and async_settings(config.trainer).partial
    return alternates and rollout.tensor_model_parallel_size == 1 and not names.rollout_traits(rollout.name).third_party


def resolve_asynchronous(config: PPOConfig, report: Report) -> None:
    """Set `rollout.mode=async` and the default of `trainer.overlap` for asynchronous modes."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    if trainer.mode != "sync" and rollout.mode == "sync":
        rollout.mode = "async"
        report.notice(f"trainer.mode = {trainer.mode}: {ROLLOUT}.mode is set to async.")
    if trainer.overlap is None:
        # Alternating uses devices fully; but if responses must finish first, it would be the sync mode.
        trainer.overlap = not async_settings(trainer).partial


def check_loop_capacity(config: PPOConfig, report: Report) -> None:
    """Report a value of agent.max_concurrent_requests that leaves most of the engines' capacity unused."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    agent = rollout.agent
    if trainer.mode == "sync" or agent.default_agent_loop == names.SINGLE_TURN:
        return
    batch = config.data.train_batch_size * rollout.n
    slots = layout_of(config, "rollout").dp_size * rollout.max_num_seqs
    usable = min((async_settings(trainer).max_staleness + 1) * batch, slots)
    conversations = agent.num_workers * agent.max_concurrent_requests
    if 2 * conversations < usable:
        report.notice(
            f"{ROLLOUT}.agent.max_concurrent_requests = {agent.max_concurrent_requests}: {agent.num_workers} loop"
            f" workers run {conversations} conversations concurrently; the engines could decode {usable}. Set it to"
            " null (automatic), or raise it."
        )
