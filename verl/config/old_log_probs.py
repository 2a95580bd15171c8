"""Where old log-probs come from: a pass of their own, or the update's first forward pass, which is the same policy."""

from __future__ import annotations

from verl.config.layout import ACTOR
from verl.config.ppo import PPOConfig
from verl.config.problems import Report

KEY = f"{ACTOR}.old_log_prob_from_update"


def from_update(config: PPOConfig) -> bool:
    """Whether an update gives them itself: as set, or wherever nothing speaks against it."""
    wanted = config.actor_rollout_ref.actor.old_log_prob_from_update
    return not objections(config) if wanted is None else wanted


def objections(config: PPOConfig) -> list[str]:
    """Why the update's own pass cannot give them, by key.

    With one optimizer step per batch the policy is the old one throughout the update: the ratio is 1 by definition,
    whatever the loss. What is left is whoever reads them before the update.
    """
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    correction = algorithm.rollout_correction
    steps = actor.ppo_epochs * max(1, config.data.train_batch_size // actor.ppo_mini_batch_size)
    found = []
    if steps > 1:
        found.append(
            f"{ACTOR}.ppo_mini_batch_size = {actor.ppo_mini_batch_size} and {ACTOR}.ppo_epochs = {actor.ppo_epochs}"
            f" take {steps} optimizer steps per batch, and only the first starts from the old policy"
        )
    if algorithm.use_kl_in_reward:
        found.append("algorithm.use_kl_in_reward = True reads them before the update")
    if config.distillation.enabled and config.distillation.distillation_loss.as_reward:
        found.append("distillation.distillation_loss.as_reward = True reads them before the update")
    if correction.bypass_mode:
        found.append("algorithm.rollout_correction.bypass_mode = True takes the rollout's")
    for name in ("rollout_is", "rollout_rs"):
        if correction[name] is not None:
            found.append(f"algorithm.rollout_correction.{name} = {correction[name]} reads them before the update")
    return found


def old_log_prob_rules(config: PPOConfig, report: Report) -> None:
    """Report what contradicts `old_log_prob_from_update=True`."""
    against = objections(config)
    if config.actor_rollout_ref.actor.old_log_prob_from_update and against:
        report.problem(KEY, True, "; ".join(against), "Leave it out, or change what it names")
