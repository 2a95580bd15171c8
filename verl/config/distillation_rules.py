"""Rules of `distillation.*`: teachers that are there, each row with one teacher, and what contradicts learning so."""

from __future__ import annotations

from collections import Counter

from verl.config.layout import ROLLOUT, layout_of
from verl.config.ppo import PPOConfig
from verl.config.problems import Report

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
