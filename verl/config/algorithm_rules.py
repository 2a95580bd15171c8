"""Rules between keys of `algorithm.*` and of the policy loss: what would have no effect, or could never work."""

from __future__ import annotations

from collections import Counter

from verl.config import names
from verl.config.algorithm import bounds, rejections
from verl.config.asynchronous import ahead_of
from verl.config.layout import ACTOR, ROLLOUT, layout_of
from verl.config.old_log_probs import old_log_prob_rules
from verl.config.ppo import PPOConfig
from verl.config.problems import Report


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


_TEACHERS = "distillation.teacher_models"
_LOSS = "distillation.distillation_loss"


def distillation_rules(config: PPOConfig, report: Report) -> None:
    """Report teachers that are missing or contradict each other, and scores that nobody would read."""
    if not config.distillation.enabled:
        return
    _teachers(config, report)
    loss, alone = config.distillation.distillation_loss, not config.distillation.scores_answers
    if loss.loss_mode == "k1" and not loss.as_reward:
        report.notice(
            f"{_LOSS}.loss_mode = k1: the gradient of this estimate is 0 on average, and nothing is learned from the "
            f"teachers. Set {_LOSS}.loss_mode=k1+ for the same value with the KL's gradient."
        )
    if loss.as_reward and loss.over_top_tokens:
        why = f"{_LOSS}.as_reward = True rewards the sampled token, which a KL over many tokens is not about"
        report.problem(f"{_LOSS}.loss_mode", loss.loss_mode, why, "Set it to k1, or as_reward=False")
    for key, wanted, why in (
        ("reward_model.enable", config.reward_model.enable, "nothing would read its scores"),
        ("algorithm.filter_groups.enable", config.algorithm.filter_groups.enable, "no answer has a score to differ in"),
    ):
        if alone and wanted:
            fix = f"Set it to False, or {_LOSS}.use_task_rewards=True"
            report.problem(key, True, f"{_LOSS}.use_task_rewards = False: {why}", fix)
    if loss.as_reward and config.algorithm.adv_estimator == "gdpo" and config.algorithm.gdpo.reward_keys:
        why = "gdpo normalises each reward on its own, and a KL inside the token rewards is none of them"
        report.problem(f"{_LOSS}.as_reward", True, why, "Set it to False", ("algorithm.adv_estimator",))


def _teachers(config: PPOConfig, report: Report) -> None:
    teachers = config.distillation.teacher_models
    if not teachers:
        why = "distillation.enabled = True needs a teacher"
        report.problem(_TEACHERS, {}, why, f"Set {_TEACHERS}.<name>.model_path=…, with a name of your choice")
    for key, count in Counter(teacher.key for teacher in teachers.values()).items():
        if count > 1:
            mine = [name for name, teacher in teachers.items() if teacher.key == key]
            whose = "no key: at most one can be for all other rows" if key is None else "this key"
            fix = "Give each teacher the data_source that it is for"
            report.problem(f"{_TEACHERS}.{mine[1]}.key", key, f"{' and '.join(mine)} have {whose}", fix)
    ranks = layout_of(config, "teacher").world_size
    for name, teacher in teachers.items():
        if teacher.url:
            _served(config, name, report)
            continue
        if teacher.model_path is None:
            report.problem(f"{_TEACHERS}.{name}.model_path", None, "the teacher has no weights", "Set it, or url=…")
        if teacher.num_replicas is not None and ranks % teacher.num_replicas:
            why = f"copies do not divide the {ranks} ranks of {layout_of(config, 'teacher').pool}"
            fix = "Set a divisor, or leave it out: one copy is shared by all ranks"
            report.problem(f"{_TEACHERS}.{name}.num_replicas", teacher.num_replicas, why, fix)


def _served(config: PPOConfig, name: str, report: Report) -> None:
    temperature, teacher = config.actor_rollout_ref.rollout.temperature, config.distillation.teacher_models[name]
    if temperature != 1:
        why = f"{_TEACHERS}.{name}.url: a server tells log-probs at temperature 1, and the student answers at another"
        fix = f"Set it to 1.0, or {_TEACHERS}.{name}.model_path and let the teacher run here"
        report.problem(f"{ROLLOUT}.temperature", temperature, why, fix)
    for key in ("model_path", "num_replicas"):
        if teacher[key] is not None:
            report.notice(f"{_TEACHERS}.{name}.{key} = {teacher[key]}: no effect, the servers at url have the teacher.")
