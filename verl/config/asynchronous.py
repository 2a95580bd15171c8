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
    """Largest age of a response's oldest token, in training steps."""
    staleness_strategy: str
    """What happens to responses about to exceed `max_staleness`: "wait" for them, or "drop" and resample."""
    in_order: bool
    """Groups are trained in the order in which they were submitted."""
    partial_rollout: bool
    """Unfinished responses continue across weight syncs; else a weight sync waits for them."""


def async_settings(trainer: TrainerConfig) -> AsyncSettings:
    """Return the settings that `trainer.mode` implies. For mode sync they are those of async, but do not apply."""
    if trainer.mode == "one_step_off":
        return AsyncSettings(1, "wait", in_order=True, partial_rollout=False)
    # Without staleness, training equals that of mode sync, which also depends on the order.
    in_order = trainer.max_staleness == 0
    return AsyncSettings(trainer.max_staleness, trainer.staleness_strategy, in_order, trainer.partial_rollout)


def engine_pauses_in_updates(config: PPOConfig) -> bool:
    """Whether an in-process engine of one rank pauses from the start of an update to the weight sync."""
    rollout = config.actor_rollout_ref.rollout
    # Generation and updates alternate, and responses continue after the weight sync.
    is_alternating = not config.trainer.overlap and async_settings(config.trainer).partial_rollout
    is_third_party = names.rollout_traits(rollout.name).third_party
    return is_alternating and rollout.tensor_model_parallel_size == 1 and not is_third_party


def resolve_asynchronous(config: PPOConfig, report: Report) -> None:
    """Set `rollout.mode=async` and the default of `trainer.overlap` for asynchronous modes."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    if trainer.mode != "sync" and rollout.mode == "sync":
        rollout.mode = "async"
        report.notice(f"trainer.mode = {trainer.mode}: {ROLLOUT}.mode is set to async.")
    if trainer.overlap is None:
        # Alternating generation and updates keeps shared devices busy. But if a weight sync waits for all responses,
        # it would make the mode as slow as sync.
        trainer.overlap = not async_settings(trainer).partial_rollout


def check_loop_capacity(config: PPOConfig, report: Report) -> None:
    """Report a value of agent.max_concurrent_requests that leaves most of the engines' capacity unused."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    agent = rollout.agent
    if trainer.mode == "sync" or agent.default_agent_loop == names.SINGLE_TURN:
        return
    batch = config.data.train_batch_size * rollout.n
    slots = layout_of(config, "rollout").dp_size * rollout.max_num_seqs
    # The staleness limits the responses in flight, and the engines limit those that are decoded at a time.
    usable = min((async_settings(trainer).max_staleness + 1) * batch, slots)
    max_conversations = agent.num_workers * agent.max_concurrent_requests
    if 2 * max_conversations < usable:
        report.notice(
            f"{ROLLOUT}.agent.max_concurrent_requests = {agent.max_concurrent_requests}: {agent.num_workers} loop"
            f" workers run {max_conversations} conversations concurrently; the engines could decode {usable}. Set it to"
            " null (automatic), or raise it."
        )
