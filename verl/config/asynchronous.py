"""Training that does not wait: what the modes mean, what they turn on, and how other versions' scripts spell them."""

from __future__ import annotations

from typing import NamedTuple

from verl.config import names
from verl.config.layout import ROLLOUT, layout_of
from verl.config.ppo import PPOConfig
from verl.config.problems import Report
from verl.config.trainer import TrainerConfig


class Ahead(NamedTuple):
    """How far answers may be ahead of training."""

    max_staleness: int
    strategy: str
    in_order: bool
    """Groups are trained in the order in which they were asked for."""
    partial: bool
    """Answers under way go on through a hand-over of weights; else it waits for them."""


def ahead_of(trainer: TrainerConfig) -> Ahead:
    """What a mode other than sync means."""
    if trainer.mode == "one_step_off":
        return Ahead(1, "wait", in_order=True, partial=False)
    exact = trainer.max_staleness == 0
    return Ahead(trainer.max_staleness, trainer.staleness_strategy, in_order=exact, partial=trainer.partial_rollout)


def stands_still(config: PPOConfig) -> bool:
    """Whether an engine in the trainer's process, alone, computes nothing until weights are handed over."""
    rollout, turns = config.actor_rollout_ref.rollout, not config.trainer.overlap and ahead_of(config.trainer).partial
    return turns and rollout.tensor_model_parallel_size == 1 and not names.ROLLOUTS[rollout.name].foreign


def resolve_asynchronous(config: PPOConfig, report: Report) -> None:
    """Answers that are generated beside training proceed on their own."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    if trainer.mode != "sync" and rollout.mode == "sync":
        rollout.mode = "async"
        report.notice(f"trainer.mode = {trainer.mode}: {ROLLOUT}.mode is async, answers are generated one by one.")
    if trainer.overlap is None:
        # By turns a device is full of either; where answers must be finished first, turns would be the sync mode.
        trainer.overlap = not ahead_of(trainer).partial


def check_loop_capacity(config: PPOConfig, report: Report) -> None:
    """Report a value of agent.max_concurrent_requests that leaves most of the engines' capacity unused."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    agent = rollout.agent
    if trainer.mode == "sync" or agent.default_agent_loop == names.SINGLE_TURN:
        return
    batch = config.data.train_batch_size * rollout.n
    slots = layout_of(config, "rollout").dp_size * rollout.max_num_seqs
    usable = min((ahead_of(trainer).max_staleness + 1) * batch, slots)
    conversations = agent.num_workers * agent.max_concurrent_requests
    if 2 * conversations < usable:
        report.notice(
            f"{ROLLOUT}.agent.max_concurrent_requests = {agent.max_concurrent_requests}: {agent.num_workers} loop"
            f" workers run {conversations} conversations concurrently; the engines could decode {usable}. Set it to"
            " null (automatic), or raise it."
        )
