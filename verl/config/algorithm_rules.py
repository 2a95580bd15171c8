"""Rules between keys of `algorithm.*` and of the policy loss: what would have no effect, or could never work."""

from __future__ import annotations

from verl.config import names
from verl.config.layout import ACTOR
from verl.config.old_log_probs import old_log_prob_rules
from verl.config.ppo import PPOConfig
from verl.config.problems import Report
from verl.config.rollout_correction_rules import correction_rules


def algorithm_rules(config: PPOConfig, report: Report) -> None:
    """Report dynamic sampling that cannot fill a batch, rewards nobody reads, corrections that contradict."""
    _filter_groups(config, report)
    _gdpo(config, report)
    _truncated_responses(config, report)
    loss = config.actor_rollout_ref.actor.policy_loss
    if loss.clip_cov_lb > loss.clip_cov_ub:
        why = f"is above {ACTOR}.policy_loss.clip_cov_ub = {loss.clip_cov_ub:g}: no token could be chosen"
        report.problem(f"{ACTOR}.policy_loss.clip_cov_lb", loss.clip_cov_lb, why, "Set it below")
    _unread_clip(config, report)
    old_log_prob_rules(config, report)
    correction_rules(config, report)


def _unread_clip(config: PPOConfig, report: Report) -> None:
    actor = config.actor_rollout_ref.actor
    own = names.loss_traits(actor.policy_loss.loss_mode)
    if own.clip is None and (actor.clip_ratio_low, actor.clip_ratio_high) != own.clip_range:
        report.notice(
            f"{ACTOR}.clip_ratio has no effect with {ACTOR}.policy_loss.loss_mode = {actor.policy_loss.loss_mode}: "
            "this loss does not clip the ratio."
        )


def _filter_groups(config: PPOConfig, report: Report) -> None:
    rule, data = config.algorithm.filter_groups, config.data
    most = rule.max_num_gen_batches * data.gen_batch_size
    if rule.enable and 0 < most < data.train_batch_size:
        why = (
            f"at most {most} prompts (× data.gen_batch_size = {data.gen_batch_size}) are tried for the "
            f"data.train_batch_size = {data.train_batch_size} of a training step"
        )
        fix = f"Set it to {-(-data.train_batch_size // data.gen_batch_size)} or more, or 0 for no limit"
        uses = ("data.gen_batch_size", "data.train_batch_size")
        report.problem("algorithm.filter_groups.max_num_gen_batches", rule.max_num_gen_batches, why, fix, uses)


def _truncated_responses(config: PPOConfig, report: Report) -> None:
    wanted, estimator = config.algorithm.truncated_responses, config.algorithm.adv_estimator
    reads_values = names.estimator_traits(estimator).needs_critic is not False
    if wanted == "bootstrap" and not (config.critic.enable and reads_values):
        why = f"needs the values of a critic, and algorithm.adv_estimator = {estimator} reads none"
        fix = "Set it to mask or keep, or algorithm.adv_estimator=gae"
        report.problem("algorithm.truncated_responses", wanted, why, fix, ("algorithm.adv_estimator",))


def _gdpo(config: PPOConfig, report: Report) -> None:
    algorithm = config.algorithm
    keys, weights = algorithm.gdpo.reward_keys, algorithm.gdpo.reward_weights
    if algorithm.adv_estimator != "gdpo":
        return
    if not keys:
        report.notice(
            "algorithm.gdpo.reward_keys is not set: the score is the only reward. Name those that your reward returns,"
            " e.g. [score,format]."
        )
    if weights and len(weights) != max(1, len(keys)):
        why = f"are {len(weights)} for {max(1, len(keys))} rewards (algorithm.gdpo.reward_keys)"
        report.problem("algorithm.gdpo.reward_weights", weights, why, "Give one for each, or leave it out")
    if keys and algorithm.use_kl_in_reward:
        why = "gdpo normalises each reward on its own, and a KL inside the token rewards is none of them"
        fix = f"Set {ACTOR}.use_kl_loss=True instead"
        report.problem("algorithm.use_kl_in_reward", True, why, fix, ("algorithm.adv_estimator",))
