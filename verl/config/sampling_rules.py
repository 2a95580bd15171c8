"""Sampling in training: where answers are not drawn from the policy that learns, the start says so."""

from __future__ import annotations

from verl.config.plan import ROLLOUT
from verl.config.ppo import PPOConfig
from verl.config.problems import Report

_CORRECTION = "algorithm.rollout_correction"


def truncations(config: PPOConfig) -> list[str]:
    """What cuts off a part of the distribution that training answers are drawn from, as `key = value`."""
    rollout = config.actor_rollout_ref.rollout
    cuts = {"top_p": rollout.top_p < 1, "top_k": rollout.top_k > 0, "min_p": rollout.min_p > 0}
    return [f"{ROLLOUT}.{name} = {rollout[name]:g}" for name, cut in cuts.items() if cut and rollout.do_sample]


def sampling_rules(config: PPOConfig, report: Report) -> None:
    """Say that truncated sampling is off-policy, what it is corrected by, and what to set."""
    rule, cut = config.algorithm.rollout_correction, truncations(config)
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
    if drawn and users:
        report.notice(f"{said} {_CORRECTION}.denominator = drawn corrects for it by {' and '.join(users)}.")
        return
    ways = "" if users else f" together with {_CORRECTION}.rollout_is=token or {_CORRECTION}.bypass_mode=True"
    report.notice(
        f"{said} For on-policy training leave them at top_p=1, top_k=-1 and min_p=0; to correct for it, set "
        f"{_CORRECTION}.denominator=drawn{ways}."
    )
