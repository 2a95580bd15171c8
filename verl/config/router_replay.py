"""Router replay: what updates that go through the experts of an earlier pass need of the rollout and of that pass."""

from __future__ import annotations

from verl.config.layout import ACTOR, ROLLOUT
from verl.config.ppo import PPOConfig
from verl.config.problems import Report

KEY = f"{ACTOR}.router_replay.mode"
# Rollout engines that say which experts a token went through.
_RECORDS_EXPERTS = ("native", "vllm")


def router_replay_rules(config: PPOConfig, report: Report) -> None:
    """Report a replay of experts that nobody records."""
    rollout, mode = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.router_replay.mode
    engines = " or ".join(_RECORDS_EXPERTS)
    if mode == "R3" and rollout.name not in _RECORDS_EXPERTS:
        why = f"{ROLLOUT}.name = {rollout.name} does not say which experts a token went through"
        report.problem(KEY, mode, why, f"Set it to R2, or {ROLLOUT}.name to {engines}", (f"{ROLLOUT}.name",))
    elif mode == "R3" and rollout.server_urls:
        why = f"the engines at {ROLLOUT}.server_urls do not say which experts a token went through"
        fix = f"Set it to R2, or leave {ROLLOUT}.server_urls out"
        report.problem(KEY, mode, why, fix, (f"{ROLLOUT}.server_urls",))
    elif mode == "R3" and not rollout.return_routed_experts:
        why = "they are replayed (router_replay.mode = R3)"
        report.problem(f"{ROLLOUT}.return_routed_experts", False, why, "Leave it out")
    elif mode == "R2" and rollout.return_routed_experts:
        why = "those of the old log-probs are replayed (router_replay.mode = R2)"
        report.problem(f"{ROLLOUT}.return_routed_experts", True, why, f"Leave it out, or set {KEY}=R3")
    bypass = "algorithm.rollout_correction.bypass_mode"
    if mode == "R2" and config.algorithm.rollout_correction.bypass_mode:
        why = f"{bypass} = True leaves out the pass whose experts it replays"
        report.problem(KEY, mode, why, f"Set it to R3, or {bypass}=False", (bypass,))
