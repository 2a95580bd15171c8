"""Rules between keys of `algorithm.*` and of the policy loss: what would have no effect, or could never work."""

from __future__ import annotations

from verl.config import names
from verl.config.asynchronous import ahead_of
from verl.config.layout import ACTOR, ROLLOUT
from verl.config.old_log_probs import old_log_prob_rules
from verl.config.ppo import PPOConfig
from verl.config.problems import Report

_CORRECTION = "algorithm.rollout_correction"


def algorithm_rules(config: PPOConfig, report: Report) -> None:
    """Report dynamic sampling that cannot fill a batch, rewards nobody reads, corrections that contradict."""
    _filter_groups(config, report)
    _gdpo(config, report)
    _rollout_correction(config, report)
    _truncated_responses(config, report)
    loss = config.actor_rollout_ref.actor.policy_loss
    if loss.clip_cov_lb > loss.clip_cov_ub:
        why = f"is above {ACTOR}.policy_loss.clip_cov_ub = {loss.clip_cov_ub:g}: no token could be chosen"
        report.problem(f"{ACTOR}.policy_loss.clip_cov_lb", loss.clip_cov_lb, why, "Set it below")
    _unread_clip(config, report)
    old_log_prob_rules(config, report)
    _sampling(config, report)
    _staleness(config, report)


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
    reads_values = estimator not in names.ADV_ESTIMATORS or names.estimator_traits(estimator).critic  # a user's may
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


def _rollout_correction(config: PPOConfig, report: Report) -> None:
    path, rule = _CORRECTION, config.algorithm.rollout_correction
    upper = rule.rollout_rs_threshold or rule.rollout_is_threshold
    lower = rule.rollout_rs_threshold_lower or 1 / upper
    if rule.rollout_rs is not None and lower > upper:
        why = f"the lower one is {lower:g}, the upper one {upper:g}: everything would be masked"
        fix = f"Set {path}.rollout_rs_threshold above 1, or both thresholds in order"
        report.problem(f"{path}.rollout_rs_threshold", rule.rollout_rs_threshold, why, fix)
    for name in ("rollout_is", "rollout_rs"):
        if rule.bypass_mode and rule[name] is not None:
            why = f"{path}.bypass_mode = True takes the rollout's log-probs as the old ones: there is no ratio to use"
            report.problem(f"{path}.{name}", rule[name], why, f"Leave it out, or set {path}.bypass_mode=False")


def _sampling(config: PPOConfig, report: Report) -> None:
    """Say that truncated sampling is off-policy, what it is corrected by, and what to set."""
    rule, cut = config.algorithm.rollout_correction, _truncations(config)
    drawn = rule.denominator == "drawn"
    if not cut:
        if drawn and config.actor_rollout_ref.rollout.do_sample:
            report.notice(
                f"{_CORRECTION}.denominator = drawn has no effect: nothing is cut off from what answers are drawn from "
                f"({ROLLOUT}.top_p, top_k, min_p)."
            )
        return
    said = (
        f"{', '.join(cut)}: answers are drawn from a part of the distribution, and the loss takes it for the whole: "
        "training is off-policy (rollout_corr/truncation_kl measures how far)."
    )
    users = ["bypass_mode"] if rule.bypass_mode else [name for name in ("rollout_is", "rollout_rs") if rule[name]]
    engine = config.actor_rollout_ref.rollout.name
    reports = names.ROLLOUTS[engine].reports
    if users and rule.denominator not in reports:
        why = f"{ROLLOUT}.name = {engine} reports log-probs under the {reports[0]} distribution only ({', '.join(cut)})"
        fix = f"Set it to {reports[0]}, or leave out {_CORRECTION}.{' and '.join(users)}"
        report.problem(f"{_CORRECTION}.denominator", rule.denominator, why, fix, (f"{ROLLOUT}.name",))
        return
    if drawn and users:
        report.notice(f"{said} {_CORRECTION}.denominator = drawn corrects for it by {' and '.join(users)}.")
        return
    ways = "" if users else f" together with {_CORRECTION}.rollout_is=token or {_CORRECTION}.bypass_mode=True"
    report.notice(
        f"{said} For on-policy training leave them at top_p=1, top_k=-1 and min_p=0; to correct for it, set "
        f"{_CORRECTION}.denominator=drawn{ways}."
    )


def _staleness(config: PPOConfig, report: Report) -> None:
    """Say that stale answers are off-policy where nothing weighs them."""
    trainer, rule = config.trainer, config.algorithm.rollout_correction
    if trainer.mode == "sync" or rule.rollout_is is not None or rule.bypass_mode:
        return
    if (oldest := ahead_of(trainer).max_staleness) > 0:
        report.notice(
            f"trainer.mode = {trainer.mode}: answers may be {oldest} steps old, and the loss takes them for the present"
            f" policy's. Set {_CORRECTION}.rollout_is=token to weigh their tokens (docs/asynchronous.md has the bias"
            " of every way)."
        )


def _truncations(config: PPOConfig) -> list[str]:
    """What cuts off a part of the distribution that training answers are drawn from, as `key = value`."""
    rollout = config.actor_rollout_ref.rollout
    cuts = {"top_p": rollout.top_p < 1, "top_k": rollout.top_k > 0, "min_p": rollout.min_p > 0}
    return [f"{ROLLOUT}.{name} = {rollout[name]:g}" for name, cut in cuts.items() if cut and rollout.do_sample]
