"""Source of old log-probs: a separate forward pass, or the first forward pass of the update (the same policy)."""

from __future__ import annotations

from verl.config.layout import ACTOR
from verl.config.ppo import PPOConfig
from verl.config.problems import Report

KEY = f"{ACTOR}.old_log_prob_from_update"


def from_update(config: PPOConfig) -> bool:
    """Whether the update provides old log-probs: as set; null: if there are no conflicts."""
    value = config.actor_rollout_ref.actor.old_log_prob_from_update
    return not conflicts(config) if value is None else value


def conflicts(config: PPOConfig) -> list[str]:
    """Return the reasons why the update cannot provide old log-probs.

    With one optimizer step per batch the policy is the old one during the whole update, so the ratio is 1. The
    remaining conflicts are consumers of old log-probs before the update.
    """
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    correction = algorithm.rollout_correction
    steps = actor.ppo_epochs * max(1, config.data.train_batch_size // actor.ppo_mini_batch_size)
    reasons = []
    if steps > 1:
        reasons.append(
            f"{ACTOR}.ppo_mini_batch_size = {actor.ppo_mini_batch_size} and {ACTOR}.ppo_epochs = {actor.ppo_epochs}"
            f" take {steps} optimizer steps per batch, and only the first starts from the old policy"
        )
    if algorithm.use_kl_in_reward:
        reasons.append("algorithm.use_kl_in_reward = True reads them before the update")
    if config.distillation.enabled and config.distillation.distillation_loss.as_reward:
        reasons.append("distillation.distillation_loss.as_reward = True reads them before the update")
    if correction.bypass_mode:
        reasons.append("algorithm.rollout_correction.bypass_mode = True uses the rollout's")
    for name in ("rollout_is", "rollout_rs"):
        if correction[name] is not None:
            reasons.append(f"algorithm.rollout_correction.{name} = {correction[name]} reads them before the update")
    return reasons


def old_log_prob_rules(config: PPOConfig, report: Report) -> None:
    """Report conflicts with `old_log_prob_from_update=True`."""
    reasons = conflicts(config)
    if config.actor_rollout_ref.actor.old_log_prob_from_update and reasons:
        report.problem(KEY, True, "; ".join(reasons), "Leave it out, or change these keys")
