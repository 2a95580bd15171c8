"""Rules of `algorithm.rollout_correction`: what `auto` stands for, what contradicts, what stays off-policy."""

from __future__ import annotations

from verl.config import names
from verl.config.asynchronous import ahead_of
from verl.config.layout import ACTOR, ROLLOUT
from verl.config.ppo import PPOConfig
from verl.config.problems import Report
from verl.config.rollout_correction import bounds, rejections

_CORRECTION = "algorithm.rollout_correction"
# -A × log π per token: what REINFORCE weighs.
_PLAIN_GRADIENT = "gpg"


def resolve_correction(config: PPOConfig, report: Report) -> None:
    """`rollout_is=auto` becomes what the run needs, `loss_type=reinforce` the loss that it names."""
    rule, loss = config.algorithm.rollout_correction, config.actor_rollout_ref.actor.policy_loss
    if rule.weighs_in_the_loss:
        if loss.loss_mode not in ("vanilla", _PLAIN_GRADIENT):
            why = f"{_CORRECTION}.loss_type = reinforce is a loss of its own"
            fix = f"Leave out {ACTOR}.policy_loss.loss_mode, or {_CORRECTION}.loss_type"
            report.problem(f"{ACTOR}.policy_loss.loss_mode", loss.loss_mode, why, fix, (f"{_CORRECTION}.loss_type",))
        loss.loss_mode = _PLAIN_GRADIENT
    if rule.rollout_is == "auto":
        _weigh_what_is_stale(config, report)


def _weigh_what_is_stale(config: PPOConfig, report: Report) -> None:
    rule, actor = config.algorithm.rollout_correction, config.actor_rollout_ref.actor
    asked_otherwise = rule.bypass_mode or actor.old_log_prob_from_update
    stale = _learns_from_stale(config) and not asked_otherwise and _denominator_is_known(config)
    rule.by_itself, rule.rollout_is = stale, "token" if stale or rule.weighs_in_the_loss else None
    if stale:
        report.notice(
            f"trainer.mode = {config.trainer.mode}: answers may be {_oldest(config)} steps old, so their tokens are"
            f" weighed ({_CORRECTION}.rollout_is = token; docs/asynchronous.md has the bias of every way)."
        )


def correction_rules(config: PPOConfig, report: Report) -> None:
    """Report thresholds that cannot be read, keys that contradict, and what is off-policy and not corrected."""
    _thresholds(config, report)
    _bypass(config, report)
    _sampling(config, report)
    _staleness(config, report)


def _thresholds(config: PPOConfig, report: Report) -> None:
    rule = config.algorithm.rollout_correction
    try:
        if bounds(rule.rollout_is_threshold).upper < 1:
            raise ValueError(
                "below 1 every ratio would be cut, those of equal policies too; lo_hi in a file: '0.5_2.0'"
            )
    except ValueError as error:
        report.problem(f"{_CORRECTION}.rollout_is_threshold", rule.rollout_is_threshold, str(error), "Set e.g. 2.0")
        return
    try:
        rejections(rule)
    except ValueError as error:
        key = "rollout_rs" if "is not known" in str(error) else "rollout_rs_threshold"
        fix = "Set e.g. rollout_rs=token_k1,seq_max_k2 with rollout_rs_threshold=0.5_2.0,0.1"
        report.problem(f"{_CORRECTION}.{key}", rule[key], str(error), fix)


def _bypass(config: PPOConfig, report: Report) -> None:
    rule = config.algorithm.rollout_correction
    if not rule.bypass_mode:
        return
    why = f"{_CORRECTION}.bypass_mode = True takes the rollout's log-probs as the old ones: there is no ratio to use"
    fix = f"Leave it out, or set {_CORRECTION}.bypass_mode=False"
    if rule.rollout_rs is not None:
        report.problem(f"{_CORRECTION}.rollout_rs", rule.rollout_rs, why, fix)
    if rule.rollout_is is not None and not rule.weighs_in_the_loss:
        fix += f", or {_CORRECTION}.loss_type=reinforce, which weighs in the update"
        report.problem(f"{_CORRECTION}.rollout_is", rule.rollout_is, why, fix)
    if rule.rollout_is_batch_normalize and rule.weighs_in_the_loss:
        why = f"{_CORRECTION}.loss_type = reinforce weighs one micro-batch at a time: the batch has no mean yet"
        fix = f"Leave it out, or set {_CORRECTION}.bypass_mode=False"
        report.problem(f"{_CORRECTION}.rollout_is_batch_normalize", True, why, fix)


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
    rule, oldest = config.algorithm.rollout_correction, _oldest(config)
    if _learns_from_stale(config) and rule.rollout_is is None and not rule.bypass_mode:
        report.notice(
            f"trainer.mode = {config.trainer.mode}: answers may be {oldest} steps old, and the loss takes them for the"
            f" present policy's. Set {_CORRECTION}.rollout_is=token to weigh their tokens (docs/asynchronous.md has the"
            " bias of every way)."
        )


def _oldest(config: PPOConfig) -> int:
    """How many steps older than the weights an answer may be."""
    return 0 if config.trainer.mode == "sync" else ahead_of(config.trainer).max_staleness


def _learns_from_stale(config: PPOConfig) -> bool:
    """Whether a policy loss takes answers that may be older than the weights."""
    loss = config.distillation.distillation_loss
    only_teachers = config.distillation.enabled and not loss.use_task_rewards and not loss.as_reward
    return _oldest(config) > 0 and not only_teachers


def _denominator_is_known(config: PPOConfig) -> bool:
    """Whether the engine reports the log-probs that ratios are taken to; where nobody set which, those that it does."""
    rule, reports = config.algorithm.rollout_correction, names.ROLLOUTS[config.actor_rollout_ref.rollout.name].reports
    if not _truncations(config) or rule.denominator in reports:
        return True
    if f"{_CORRECTION}.denominator" in config.changed:
        return False
    rule.denominator = reports[0]
    return True


def _truncations(config: PPOConfig) -> list[str]:
    """What cuts off a part of the distribution that training answers are drawn from, as `key = value`."""
    rollout = config.actor_rollout_ref.rollout
    cuts = {"top_p": rollout.top_p < 1, "top_k": rollout.top_k > 0, "min_p": rollout.min_p > 0}
    return [f"{ROLLOUT}.{name} = {rollout[name]:g}" for name, cut in cuts.items() if cut and rollout.do_sample]
