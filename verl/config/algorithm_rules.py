"""Rules of `algorithm.*`, the policy loss, old log-probs, rollout correction and distillation."""

from __future__ import annotations

from collections import Counter

from verl.config import names
from verl.config.algorithm import parse_bounds, parse_rejections
from verl.config.layout import ACTOR, ROLLOUT, async_settings, layout_of, old_log_prob_conflicts
from verl.config.ppo import PPOConfig
from verl.config.problems import Report

_CORRECTION = "algorithm.rollout_correction"
_OLD_LOG_PROB_FROM_UPDATE = f"{ACTOR}.old_log_prob_from_update"
# Loss with the policy gradient -A × log π per token, without a ratio.
_PLAIN_GRADIENT = "gpg"
_TEACHERS = "distillation.teacher_models"
_LOSS = "distillation.distillation_loss"


def algorithm_rules(config: PPOConfig, report: Report) -> None:
    """Report problems of dynamic sampling, GDPO, truncation, clipping, old log-probs and rollout correction."""
    _filter_groups(config, report)
    _gdpo(config, report)
    _truncated_responses(config, report)
    loss = config.actor_rollout_ref.actor.policy_loss
    if loss.clip_cov_lb > loss.clip_cov_ub:
        why = f"is above {ACTOR}.policy_loss.clip_cov_ub = {loss.clip_cov_ub:g}: no token could be selected"
        report.problem(f"{ACTOR}.policy_loss.clip_cov_lb", loss.clip_cov_lb, why, "Set a smaller value")
    _unused_clip(config, report)
    _old_log_prob_rules(config, report)
    correction_rules(config, report)


def _unused_clip(config: PPOConfig, report: Report) -> None:
    """Add a notice if the clip range was changed, but the loss does not clip."""
    actor = config.actor_rollout_ref.actor
    traits = names.loss_traits(actor.policy_loss.loss_mode)
    if traits.clip is None and (actor.clip_ratio_low, actor.clip_ratio_high) != traits.clip_range:
        report.notice(
            f"{ACTOR}.clip_ratio has no effect with {ACTOR}.policy_loss.loss_mode = {actor.policy_loss.loss_mode}: "
            "this loss does not clip the ratio."
        )


def _filter_groups(config: PPOConfig, report: Report) -> None:
    rule, data = config.algorithm.filter_groups, config.data
    max_prompts = rule.max_num_gen_batches * data.gen_batch_size
    if rule.enable and 0 < max_prompts < data.train_batch_size:
        why = (
            f"at most {max_prompts} prompts (× data.gen_batch_size = {data.gen_batch_size}) are generated for the "
            f"data.train_batch_size = {data.train_batch_size} of a training step"
        )
        fix = f"Set it to {-(-data.train_batch_size // data.gen_batch_size)} or more, or 0 for no limit"
        uses = ("data.gen_batch_size", "data.train_batch_size")
        report.problem("algorithm.filter_groups.max_num_gen_batches", rule.max_num_gen_batches, why, fix, uses)


def _truncated_responses(config: PPOConfig, report: Report) -> None:
    mode, estimator = config.algorithm.truncated_responses, config.algorithm.adv_estimator
    reads_values = names.estimator_traits(estimator).needs_critic is not False
    if mode == "bootstrap" and not (config.critic.enable and reads_values):
        why = f"requires the values of a critic, which algorithm.adv_estimator = {estimator} does not use"
        fix = "Set it to mask or keep, or algorithm.adv_estimator=gae"
        report.problem("algorithm.truncated_responses", mode, why, fix, ("algorithm.adv_estimator",))


def _gdpo(config: PPOConfig, report: Report) -> None:
    algorithm = config.algorithm
    if algorithm.adv_estimator != "gdpo":
        return
    keys, weights = algorithm.gdpo.reward_keys, algorithm.gdpo.reward_weights
    if not keys:
        report.notice(
            "algorithm.gdpo.reward_keys is not set: the score is the only reward. Set the fields of your reward,"
            " e.g. [score,format]."
        )
    if weights and len(weights) != max(1, len(keys)):
        why = f"{len(weights)} weights for {max(1, len(keys))} rewards (algorithm.gdpo.reward_keys)"
        report.problem("algorithm.gdpo.reward_weights", weights, why, "Set one weight for each reward, or leave it out")
    if keys and algorithm.use_kl_in_reward:
        why = "gdpo normalises each reward separately, and a KL in the token rewards is not one of them"
        fix = f"Set {ACTOR}.use_kl_loss=True instead"
        report.problem("algorithm.use_kl_in_reward", True, why, fix, ("algorithm.adv_estimator",))


def _old_log_prob_rules(config: PPOConfig, report: Report) -> None:
    """Report conflicts with `old_log_prob_from_update=True`."""
    reasons = old_log_prob_conflicts(config)
    if config.actor_rollout_ref.actor.old_log_prob_from_update and reasons:
        report.problem(_OLD_LOG_PROB_FROM_UPDATE, True, "; ".join(reasons), "Leave it out, or change these keys")


def resolve_correction(config: PPOConfig, report: Report) -> None:
    """Replace `rollout_is=auto` by a value; set the policy loss for `loss_type=reinforce`, which replaces it."""
    rule, loss = config.algorithm.rollout_correction, config.actor_rollout_ref.actor.policy_loss
    if rule.computes_weights_in_loss:
        if loss.loss_mode not in ("vanilla", _PLAIN_GRADIENT):
            why = f"{_CORRECTION}.loss_type = reinforce replaces the policy loss"
            fix = f"Leave out {ACTOR}.policy_loss.loss_mode, or {_CORRECTION}.loss_type"
            report.problem(f"{ACTOR}.policy_loss.loss_mode", loss.loss_mode, why, fix, (f"{_CORRECTION}.loss_type",))
        loss.loss_mode = _PLAIN_GRADIENT
    if rule.rollout_is == "auto":
        _resolve_auto_weights(config, report)


def _resolve_auto_weights(config: PPOConfig, report: Report) -> None:
    """Set `rollout_is` to token if responses may be stale and can be corrected, or the loss requires weights."""
    rule = config.algorithm.rollout_correction
    corrects_staleness = _trains_on_stale_responses(config) and not rule.bypass_mode and _resolve_denominator(config)
    rule.rollout_is_from_auto = corrects_staleness
    rule.rollout_is = "token" if corrects_staleness or rule.computes_weights_in_loss else None
    if corrects_staleness:
        report.notice(
            f"trainer.mode = {config.trainer.mode}: responses may be {_max_age(config)} steps old, so importance"
            f" weights are used ({_CORRECTION}.rollout_is = token; docs/concepts/policy_and_weights.md has the bias of"
            " each method)."
        )


def correction_rules(config: PPOConfig, report: Report) -> None:
    """Report invalid thresholds and conflicting keys; add notices about uncorrected off-policy data."""
    _thresholds(config, report)
    _bypass(config, report)
    _sampling(config, report)
    _staleness(config, report)


def _thresholds(config: PPOConfig, report: Report) -> None:
    rule = config.algorithm.rollout_correction
    try:
        if parse_bounds(rule.rollout_is_threshold).upper < 1:
            raise ValueError(
                "an upper bound below 1 truncates even the ratios of equal policies. If you meant a range, write it in"
                " quotes: YAML reads 0.5_2 as the number 0.52"
            )
    except ValueError as error:
        report.problem(f"{_CORRECTION}.rollout_is_threshold", rule.rollout_is_threshold, str(error), "Set e.g. 2.0")
        return
    try:
        parse_rejections(rule)
    except ValueError as error:
        key = "rollout_rs" if "is not known" in str(error) else "rollout_rs_threshold"
        fix = "Set e.g. rollout_rs=token_k1,seq_max_k2 with rollout_rs_threshold=0.5_2.0,0.1"
        report.problem(f"{_CORRECTION}.{key}", rule[key], str(error), fix)


def _bypass(config: PPOConfig, report: Report) -> None:
    """Report corrections that need a ratio of old to rollout log-probs, which `bypass_mode` replaces."""
    rule = config.algorithm.rollout_correction
    if not rule.bypass_mode:
        return
    why = f"{_CORRECTION}.bypass_mode = True uses the rollout's log-probs as old log-probs: there is no ratio"
    fix = f"Leave it out, or set {_CORRECTION}.bypass_mode=False"
    if rule.rollout_rs is not None:
        report.problem(f"{_CORRECTION}.rollout_rs", rule.rollout_rs, why, fix)
    if rule.rollout_is is not None and not rule.computes_weights_in_loss:
        fix += f", or {_CORRECTION}.loss_type=reinforce, which computes weights in the update"
        report.problem(f"{_CORRECTION}.rollout_is", rule.rollout_is, why, fix)
    if rule.rollout_is_batch_normalize and rule.computes_weights_in_loss:
        why = f"{_CORRECTION}.loss_type = reinforce computes weights per micro-batch: the mean of the batch is unknown"
        fix = f"Leave it out, or set {_CORRECTION}.bypass_mode=False"
        report.problem(f"{_CORRECTION}.rollout_is_batch_normalize", True, why, fix)


def _sampling(config: PPOConfig, report: Report) -> None:
    """Add notices about truncated sampling, which is off-policy, and report an unavailable denominator."""
    rule, truncations = config.algorithm.rollout_correction, _truncations(config)
    # drawn: the distribution after truncation, from which tokens are sampled.
    is_drawn = rule.denominator == "drawn"
    if not truncations:
        if is_drawn and config.actor_rollout_ref.rollout.do_sample:
            report.notice(
                f"{_CORRECTION}.denominator = drawn has no effect: sampling is not truncated "
                f"({ROLLOUT}.top_p, top_k, min_p)."
            )
        return
    message = (
        f"{', '.join(truncations)}: responses are sampled from a truncated distribution, the loss uses "
        "the full one: training is off-policy (metric rollout_corr/truncation_kl)."
    )
    # Settings that read the rollout's log-probs.
    users = ["bypass_mode"] if rule.bypass_mode else [name for name in ("rollout_is", "rollout_rs") if rule[name]]
    engine = config.actor_rollout_ref.rollout.name
    reports = names.rollout_traits(engine).reports
    if users and rule.denominator not in reports:
        truncated_by = ", ".join(truncations)
        why = f"{ROLLOUT}.name = {engine} reports log-probs under the {reports[0]} distribution only ({truncated_by})"
        fix = f"Set it to {reports[0]}, or leave out {_CORRECTION}.{' and '.join(users)}"
        report.problem(f"{_CORRECTION}.denominator", rule.denominator, why, fix, (f"{ROLLOUT}.name",))
        return
    if is_drawn and users:
        report.notice(f"{message} {_CORRECTION}.denominator = drawn corrects for it by {' and '.join(users)}.")
        return
    addition = "" if users else f" together with {_CORRECTION}.rollout_is=token or {_CORRECTION}.bypass_mode=True"
    report.notice(
        f"{message} For on-policy training set top_p=1, top_k=-1 and min_p=0; to correct for it, set "
        f"{_CORRECTION}.denominator=drawn{addition}."
    )


def _staleness(config: PPOConfig, report: Report) -> None:
    """Add a notice about stale responses without correction."""
    rule, max_age = config.algorithm.rollout_correction, _max_age(config)
    if _trains_on_stale_responses(config) and rule.rollout_is is None and not rule.bypass_mode:
        report.notice(
            f"trainer.mode = {config.trainer.mode}: responses may be {max_age} steps old, and the loss treats them"
            f" as on-policy. Set {_CORRECTION}.rollout_is=token for importance weights"
            " (docs/concepts/policy_and_weights.md has the bias of each method)."
        )


def _max_age(config: PPOConfig) -> int:
    """Return the largest age of a response in training steps."""
    return 0 if config.trainer.mode == "sync" else async_settings(config.trainer).max_staleness


def _trains_on_stale_responses(config: PPOConfig) -> bool:
    """Return whether the policy loss uses responses that may be older than the weights."""
    loss = config.distillation.distillation_loss
    # Pure distillation has no policy loss.
    has_policy_loss = not config.distillation.enabled or loss.use_task_rewards or loss.as_reward
    return _max_age(config) > 0 and has_policy_loss


def _resolve_denominator(config: PPOConfig) -> bool:
    """Return whether the engine reports log-probs of the distribution `denominator`. If the user has not set it, set it
    to one that the engine reports."""
    rule = config.algorithm.rollout_correction
    reports = names.rollout_traits(config.actor_rollout_ref.rollout.name).reports
    if not _truncations(config) or rule.denominator in reports:
        return True
    if f"{_CORRECTION}.denominator" in config.changed:
        return False
    rule.denominator = reports[0]
    return True


def _truncations(config: PPOConfig) -> list[str]:
    """Return the sampling keys that truncate the distribution, as `key = value`."""
    rollout = config.actor_rollout_ref.rollout
    truncates = {"top_p": rollout.top_p < 1, "top_k": rollout.top_k > 0, "min_p": rollout.min_p > 0}
    return [
        f"{ROLLOUT}.{name} = {rollout[name]:g}" for name, active in truncates.items() if active and rollout.do_sample
    ]


def distillation_rules(config: PPOConfig, report: Report) -> None:
    """Report missing or conflicting teachers, and scores without effect."""
    if not config.distillation.enabled:
        return
    _teachers(config, report)
    loss, teachers_only = config.distillation.distillation_loss, not config.distillation.scores_responses
    if loss.loss_mode == "k1" and not loss.as_reward:
        report.notice(
            f"{_LOSS}.loss_mode = k1: the expected gradient of this estimate is 0: the teachers have no effect. "
            f"Set {_LOSS}.loss_mode=k1+ for the same value with the KL's gradient."
        )
    if loss.as_reward and loss.over_top_tokens:
        why = f"{_LOSS}.as_reward = True rewards sampled tokens, but this mode is a KL over the top-k tokens"
        report.problem(f"{_LOSS}.loss_mode", loss.loss_mode, why, "Set it to k1, or as_reward=False")
    for key, enabled, why in (
        ("reward_model.enable", config.reward_model.enable, "its scores would have no effect"),
        ("algorithm.filter_groups.enable", config.algorithm.filter_groups.enable, "there are no scores to compare"),
    ):
        if teachers_only and enabled:
            fix = f"Set it to False, or {_LOSS}.use_task_rewards=True"
            report.problem(key, True, f"{_LOSS}.use_task_rewards = False: {why}", fix)
    if loss.as_reward and config.algorithm.adv_estimator == "gdpo" and config.algorithm.gdpo.reward_keys:
        why = "gdpo normalises each reward separately, and a KL in the token rewards is not one of them"
        report.problem(f"{_LOSS}.as_reward", True, why, "Set it to False", ("algorithm.adv_estimator",))


def _teachers(config: PPOConfig, report: Report) -> None:
    teachers = config.distillation.teacher_models
    if not teachers:
        why = "distillation.enabled = True requires a teacher"
        report.problem(_TEACHERS, {}, why, f"Set {_TEACHERS}.<name>.model_path=…, with a name of your choice")
    for key, count in Counter(teacher.key for teacher in teachers.values()).items():
        if count > 1:
            duplicates = [name for name, teacher in teachers.items() if teacher.key == key]
            cause = "no key: at most one teacher can be the default" if key is None else "this key"
            fix = "Set key to a different data_source for each teacher"
            report.problem(f"{_TEACHERS}.{duplicates[1]}.key", key, f"{' and '.join(duplicates)} have {cause}", fix)
    ranks = layout_of(config, "teacher").world_size
    for name, teacher in teachers.items():
        if teacher.url:
            _served_teacher(config, name, report)
            continue
        if teacher.model_path is None:
            report.problem(f"{_TEACHERS}.{name}.model_path", None, "the teacher has no weights", "Set it, or url=…")
        if teacher.num_replicas is not None and ranks % teacher.num_replicas:
            why = f"does not divide the {ranks} ranks of {layout_of(config, 'teacher').pool}"
            fix = "Set a divisor, or leave it out: one copy is sharded over all ranks"
            report.problem(f"{_TEACHERS}.{name}.num_replicas", teacher.num_replicas, why, fix)


def _served_teacher(config: PPOConfig, name: str, report: Report) -> None:
    """Report settings that a teacher behind a server (`url`) does not support."""
    temperature, teacher = config.actor_rollout_ref.rollout.temperature, config.distillation.teacher_models[name]
    if temperature != 1:
        why = f"{_TEACHERS}.{name}.url: a server returns log-probs at temperature 1, but the student samples at another"
        fix = f"Set it to 1.0, or {_TEACHERS}.{name}.model_path to run the teacher in this run"
        report.problem(f"{ROLLOUT}.temperature", temperature, why, fix)
    for key in ("model_path", "num_replicas"):
        if teacher[key] is not None:
            report.notice(f"{_TEACHERS}.{name}.{key} = {teacher[key]}: no effect, the teacher runs at url.")
